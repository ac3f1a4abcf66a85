// A client of durable routes for browsers and other places with fetch: one key an operation, the same bytes each time, until the
// answer is final. No dependencies.
//
//   const key = newKey(); // keep it beside the operation (localStorage, say): a page that is loaded anew goes on with it
//   for await (const frame of stream("/answers", { json: { prompt }, key })) {
//     if (frame.type === "attempt") text = ""; // the stream begins anew: forget what it has shown
//     if (frame.type === "progress") text += frame.data.token;
//     if (frame.type === "result") done(frame.data);
//   }
//
// Options of both calls: method ("POST"), key, json or body (a string), headers, timeoutMs (the patience, counted from the first
// request or the newest frame of a stream; 300,000), signal, fetch (the page's own).

const PROBLEM_PREFIX = "urn:fencepost:durable-route:";
const CURSOR_SLUGS = new Set(["stream-cursor-invalid", "stream-cursor-gone"]);
const GATEWAY_STATUSES = new Set([502, 503, 504]);
const MONITORED_STATUSES = new Set([202, 409]); // elsewhere Location means something else
const FIRST_PAUSE_MS = 200;
const MOST_PAUSE_MS = 10_000;
const MOST_ASKED_MS = 60_000;
const MOST_DOUBLINGS = 10;
const SPREAD_MS = 250; // so that clients that were told the same do not come at once
const ANSWER_SILENCE_MS = 70_000; // a waiting answer is silent for as long as its route may wait
const STREAM_SILENCE_MS = 20_000; // a stream is never silent for longer than its pings, which are 5 s apart
const LEAST_SILENCE_MS = 1_000;
const MAX_CHARACTERS = 8_000_000;
const MAX_RETRY_MS = 1_000_000_000;

/** The operation has ended without a result, or its key cannot be used: asking again changes nothing. */
export class DurableProblem extends Error {
  constructor(problem, status) {
    const slug = String(problem.type ?? "about:blank").replace(PROBLEM_PREFIX, "");
    super(`${status} ${slug}: ${problem.title ?? ""}`);
    this.name = "DurableProblem";
    this.problem = problem; // as it came: type, title, detail, and of a workflow's own failure error_type and error_details
    this.status = status;
    this.slug = slug;
  }
}

/** The patience is over and the operation is not: keep the key, and ask again with it and the same request. */
export class AnswerNotReady extends Error {
  constructor(key, monitor, reason) {
    super(`no answer yet (${reason}); ask again with the same key and the same request`);
    this.name = "AnswerNotReady";
    this.key = key;
    this.monitor = monitor; // where the operation can be looked at, as the server gave it, or null
  }
}

/** A request for a stream got a final answer that is none, and no problem of a durable route: a 401, say. */
export class NoStream extends Error {
  constructor(answer) {
    super(`status ${answer.status} in place of a stream`);
    this.name = "NoStream";
    this.answer = answer;
  }
}

/** What answers does not speak as a durable route does: something else stands at that address. */
export class UnexpectedAnswer extends Error {
  constructor(message) {
    super(message);
    this.name = "UnexpectedAnswer";
  }
}

/** A key for a new operation. */
export function newKey() {
  // Not crypto.randomUUID, which pages without TLS do not have.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

/** Sends an operation until it has its final answer: { status, headers, text, key, replayed }, and json() for the text's value.
 *  It may be one that is none of a durable route: a 401, say, or a redirect, whose status is 0 in a browser. Throws
 *  DurableProblem, AnswerNotReady and UnexpectedAnswer. */
export async function send(url, options = {}) {
  const talk = new Talk(url, options);
  for (;;) {
    const answer = await talk.answer();
    if (answer) return answer;
    await talk.pause();
  }
}

/** The frames of an operation, each once, across as many requests as it takes: progress { id, data }, attempt { number },
 *  activity { data }, truncated {}, and at last result { data, text }. Throws as send does, and NoStream. */
export async function* stream(url, options = {}) {
  const talk = new Talk(url, options);
  for (;;) {
    for await (const frame of talk.frames()) {
      yield frame;
      if (frame.type === "result") return;
      talk.progressed(); // counted from here: what the reader does with a frame is not the server's time
    }
    await talk.pause();
  }
}

/** Reads server-sent events from text that comes in any pieces (WHATWG HTML, 9.2). */
export class EventParser {
  constructor(lastEventId = "") {
    this.lastEventId = lastEventId;
    this.retryMs = null;
    this.begun = false;
    this.afterCr = false;
    this.line = "";
    this.#clear();
  }

  /** The events that the text completes. */
  feed(text) {
    if (text && !this.begun) {
      this.begun = true;
      if (text.startsWith("\ufeff")) text = text.slice(1);
    }
    const events = [];
    for (const line of this.#lines(text)) {
      if (line) this.#take(line);
      else events.push(...this.#dispatched());
    }
    return events;
  }

  /** A CR ends its line at once; a LF right behind it belongs to the same end. */
  *#lines(text) {
    if (!text) return;
    if (this.afterCr && text.startsWith("\n")) text = text.slice(1);
    this.afterCr = text.endsWith("\r");
    const [head, ...others] = text.split(/\r\n|\r|\n/);
    this.#keep(head);
    for (const other of others) {
      const line = this.line;
      this.line = "";
      yield line;
      this.#keep(other);
    }
  }

  #keep(part) {
    this.line += part;
    this.characters += part.length;
    if (this.characters > MAX_CHARACTERS) throw new UnexpectedAnswer(`an event has more than ${MAX_CHARACTERS} characters`);
  }

  #take(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "event") this.type = value;
    else if (name === "data") this.data.push(value);
    else if (name === "id" && !value.includes("\0")) this.id = value;
    else if (name === "retry" && /^[0-9]+$/.test(value)) this.retryMs = value.length > 9 ? MAX_RETRY_MS : Number(value);
  }

  #dispatched() {
    this.lastEventId = this.id;
    const events = this.data.length
      ? [{ type: this.type || "message", data: this.data.join("\n"), lastEventId: this.id }]
      : [];
    this.#clear();
    return events;
  }

  #clear() {
    this.type = "";
    this.data = [];
    this.id = this.lastEventId;
    this.characters = 0;
  }
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DATES = [
  /^[A-Z][a-z]{2}, (?<day>\d\d) (?<month>[A-Z][a-z]{2}) (?<year>\d{4}) (?<time>\d\d:\d\d:\d\d) GMT$/, // IMF-fixdate
  /^[A-Z][a-z]{5,8}, (?<day>\d\d)-(?<month>[A-Z][a-z]{2})-(?<year>\d\d) (?<time>\d\d:\d\d:\d\d) GMT$/, // RFC 850
  /^[A-Z][a-z]{2} (?<month>[A-Z][a-z]{2}) (?<day>[ \d]\d) (?<time>\d\d:\d\d:\d\d) (?<year>\d{4})$/, // asctime
];

/** Milliseconds that a Retry-After asks for: whole seconds, or a date in one of HTTP's three forms; null for what is neither.
 *  Date.parse would guess. */
export function parseRetryAfter(text, now = Date.now()) {
  if (/^[0-9]{1,40}$/.test(text)) return Number(text) * 1000;
  const found = DATES.map((form) => form.exec(text)).find(Boolean)?.groups;
  const month = MONTHS.indexOf(found?.month);
  if (month < 0) return null;
  const [hour, minute, second] = found.time.split(":").map(Number);
  const at = (year) => Date.UTC(year, month, Number(found.day), hour, minute, second);
  let year = Number(found.year);
  if (found.year.length === 2) {
    // The latest year that ends so, and is no more than 50 years ahead.
    const thisYear = new Date(now).getUTCFullYear();
    year += thisYear - (thisYear % 100) + 100;
    while (at(year - 50) > now) year -= 100;
  }
  const day = new Date(Date.UTC(year, month, Number(found.day)));
  const exists = day.getUTCMonth() === month && Number(found.day) > 0 && hour < 24 && minute < 60 && second < 61;
  return exists ? Math.max(at(year) - now, 0) : null;
}

/** One operation, from its first request to its answer. */
class Talk {
  #address = ""; // the url, absolute

  constructor(url, { method = "POST", key = newKey(), json, body, headers, timeoutMs = 300_000, signal, fetch } = {}) {
    if (json !== undefined && body !== undefined) throw new TypeError("give json or body, not both");
    // As a header null would be "null", the same key for each operation.
    if (typeof key !== "string" || !key) throw new TypeError("key must be a string: make one with newKey()");
    this.key = key;
    this.url = url;
    this.method = method;
    // Made once: a body made anew might differ, and a key binds its body.
    this.body = json === undefined ? body : JSON.stringify(json);
    this.headers = new Headers(headers);
    for (const own of ["Idempotency-Key", "Last-Event-ID"]) {
      if (this.headers.has(own)) throw new TypeError(`headers must not hold ${own}: give the key as key; the cursor is kept here`);
    }
    if (json !== undefined && !this.headers.has("Content-Type")) this.headers.set("Content-Type", "application/json");
    this.headers.set("Idempotency-Key", key);
    this.timeoutMs = timeoutMs;
    this.signal = signal;
    this.fetch = fetch;
    this.monitor = null;
    this.failures = 0;
    this.cursor = "";
    this.seen = [0, -1n]; // place of the newest chunk, or attempt that has begun
    this.cursorGivenUp = false;
    this.retryMs = 0; // the pause that a stream asked for
    this.wait = null; // milliseconds to wait that this answer asked for
    this.reason = "";
    this.progressed();
  }

  progressed() {
    this.endsAt = Date.now() + this.timeoutMs;
    this.failures = 0;
  }

  /** The final answer, or null: then pause() and ask again. */
  async answer() {
    const connection = new Connection(this.#silence(ANSWER_SILENCE_MS), this);
    try {
      const response = await connection.open(this.#request({}));
      if (isStream(response)) throw new UnexpectedAnswer("the route streams; ask for its frames with stream()");
      return this.#plain(response, await this.#text(connection));
    } catch (error) {
      return this.#broken(error);
    } finally {
      await connection.close();
    }
  }

  /** The frames of one request. Unless the last is the result: pause() and ask again. */
  async *frames() {
    const connection = new Connection(this.#silence(STREAM_SILENCE_MS), this);
    try {
      const response = await connection.open(this.#request({ Accept: "text/event-stream, application/problem+json" }));
      if (isStream(response)) {
        yield* this.#streamed(connection);
      } else {
        const answer = this.#plain(response, await this.#text(connection));
        if (answer) throw new NoStream(answer);
      }
    } catch (error) {
      this.#broken(error);
    } finally {
      await connection.close();
    }
  }

  /** Waits until it is time to ask again. Throws AnswerNotReady when the patience would be over by then. */
  async pause() {
    let ms;
    if (this.wait === null) {
      const most = Math.min(FIRST_PAUSE_MS * 2 ** this.failures, MOST_PAUSE_MS);
      ms = Math.max(most * (0.5 + Math.random() / 2), Math.min(this.retryMs, MOST_ASKED_MS));
      this.failures = Math.min(this.failures + 1, MOST_DOUBLINGS);
    } else {
      ms = Math.max(Math.min(this.wait, MOST_ASKED_MS), FIRST_PAUSE_MS) + Math.random() * SPREAD_MS;
      this.failures = 0;
    }
    if (Date.now() + ms >= this.endsAt) throw new AnswerNotReady(this.key, this.monitor, this.reason);
    await sleep(ms, this.signal);
  }

  /** No connection may be silent for longer than the patience. */
  #silence(most) {
    return Math.max(Math.min(most, this.endsAt - Date.now()), LEAST_SILENCE_MS);
  }

  /** What cannot be sent at all is the caller's, and is thrown as it is. */
  #request(more) {
    const headers = new Headers(this.headers);
    for (const [name, value] of Object.entries(more)) headers.set(name, value);
    if (this.cursor) headers.set("Last-Event-ID", this.cursor);
    // A redirect is an answer: most make a GET of what was sent.
    const request = new Request(this.url, { method: this.method, headers, body: this.body, cache: "no-store", redirect: "manual" });
    this.#address = request.url;
    return request;
  }

  /** What a plain answer means: the final one, or null if it says to ask again; `wait` is then how long it asks for. */
  #plain(response, text) {
    if (text === "" && isCutOff(response, this.#address)) throw new Broken("the answer was cut off");
    this.wait = null;
    this.reason = `status ${response.status}`;
    const asked = response.headers.get("retry-after");
    const problem = asked === null ? durableProblem(response, text) : null;
    if (problem) return this.#refused(new DurableProblem(problem, response.status));
    if (asked === null && !GATEWAY_STATUSES.has(response.status)) return answerOf(response, text, this.key);
    if (MONITORED_STATUSES.has(response.status)) this.monitor = response.headers.get("location") ?? this.monitor;
    if (asked !== null) this.wait = parseRetryAfter(asked); // null for what cannot be read: it is not final for that
    return null;
  }

  /** A cursor that the server does not take, or no longer, is given up once: the stream begins anew for the reader. */
  #refused(problem) {
    if (!CURSOR_SLUGS.has(problem.slug) || !this.cursor || this.cursorGivenUp) throw problem;
    this.cursor = "";
    this.seen = [-1, -1n];
    this.cursorGivenUp = true;
    return null;
  }

  async *#streamed(connection) {
    this.wait = null;
    const parser = new EventParser(this.cursor);
    for (let text; (text = await connection.read()) !== null; ) {
      const events = parser.feed(text);
      this.retryMs = parser.retryMs ?? this.retryMs;
      for (const event of events) {
        this.cursor = event.lastEventId;
        if (event.type === "pending") {
          const { retry_after: seconds } = objectOf(event);
          this.wait = typeof seconds === "number" && seconds >= 0 ? seconds * 1000 : 1000;
          this.reason = "the stream's budget is over";
          return;
        }
        yield* this.#framed(event);
      }
      this.cursor = parser.lastEventId;
      this.#checkPatience("the stream goes on without news");
    }
    this.reason = "the stream broke off";
  }

  *#framed(event) {
    if (event.type === "result") yield { type: "result", data: dataOf(event), text: event.data };
    else if (event.type === "problem") throw problemOf(event);
    else if (event.type === "activity") yield { type: "activity", data: dataOf(event) };
    else if (event.type === "attempt") yield* this.#begun(Number(whole(String(objectOf(event).attempt))));
    else if (event.type === "truncated") yield* this.#placed(event, { type: "truncated" });
    else if (event.type === "progress") {
      yield* this.#placed(event, { type: "progress", id: event.lastEventId, data: dataOf(event) });
    }
  }

  *#begun(attempt) {
    if (attempt <= this.seen[0]) return; // it was sent again with a resume
    this.seen = [attempt, -1n];
    yield { type: "attempt", number: attempt };
  }

  /** Delivery is at least once across requests: what was seen is passed over. */
  *#placed(event, frame) {
    const dot = event.lastEventId.indexOf(".");
    const attempt = Number(whole(event.lastEventId.slice(0, Math.max(dot, 0))));
    const offset = whole(event.lastEventId.slice(dot + 1));
    if (attempt < this.seen[0] || (attempt === this.seen[0] && offset <= this.seen[1])) return;
    yield* this.#begun(attempt);
    this.seen = [attempt, offset];
    yield frame;
  }

  async #text(connection) {
    let text = "";
    for (let piece; (piece = await connection.read()) !== null; ) {
      text += piece;
      this.#checkPatience("the answer does not end");
      if (text.length > MAX_CHARACTERS) throw new UnexpectedAnswer(`the answer has more than ${MAX_CHARACTERS} characters`);
    }
    return text;
  }

  #checkPatience(reason) {
    if (Date.now() >= this.endsAt) throw new AnswerNotReady(this.key, this.monitor, reason);
  }

  #broken(error) {
    if (!(error instanceof Broken)) throw error;
    this.signal?.throwIfAborted();
    this.wait = null;
    this.reason = error.message;
    return null;
  }
}

/** One request on the network. Throws Broken where the network fails, or says nothing for too long. */
class Connection {
  #end = new AbortController();
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #reader = null;

  constructor(silenceMs, { signal, fetch }) {
    this.silenceMs = silenceMs;
    this.signal = signal;
    this.fetch = fetch ?? globalThis.fetch.bind(globalThis);
    this.aborted = () => this.#end.abort();
    signal?.throwIfAborted();
    signal?.addEventListener("abort", this.aborted);
  }

  async open(request) {
    const response = await this.#heard(this.fetch(request, { signal: this.#end.signal }));
    this.#reader = response.body?.getReader() ?? null;
    return response;
  }

  /** A piece of the body, null at its end. */
  async read() {
    const { done, value } = this.#reader ? await this.#heard(this.#reader.read()) : { done: true };
    return done ? null : this.#decoder.decode(value, { stream: true });
  }

  async close() {
    this.signal?.removeEventListener("abort", this.aborted);
    await this.#reader?.cancel().catch(() => {}); // it may have broken already
  }

  async #heard(promise) {
    const timer = setTimeout(() => this.#end.abort(), this.silenceMs);
    try {
      return await promise;
    } catch (error) {
      throw new Broken(error?.name ?? "the network failed");
    } finally {
      clearTimeout(timer);
    }
  }
}

class Broken extends Error {}

function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const aborted = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }, ms);
    signal?.addEventListener("abort", aborted, { once: true });
    if (signal?.aborted) aborted();
  });
}

function isStream(response) {
  return response.status === 200 && kindOf(response).startsWith("text/event-stream");
}

/** Whether an answer without a body may be a head whose end is missing: without TLS, Chromium takes it for a whole one, and what
 *  the lost lines said (Retry-After, say) is not known. */
function isCutOff(response, address) {
  const bare = [0, 204, 205, 304].includes(response.status); // 0: a redirect
  return !bare && address.startsWith("http:") && response.headers.get("content-length") !== "0";
}

function kindOf(response) {
  return (response.headers.get("content-type") ?? "").toLowerCase();
}

function answerOf(response, text, key) {
  const { status, headers } = response;
  const replayed = (headers.get("idempotent-replayed") ?? headers.get("x-idempotent-replayed")) === "true";
  return { status, headers, text, key, replayed, json: () => JSON.parse(text) };
}

function durableProblem(response, text) {
  if (!kindOf(response).startsWith("application/problem+json")) return null;
  try {
    const problem = JSON.parse(text);
    return String(problem?.type).startsWith(PROBLEM_PREFIX) ? problem : null;
  } catch {
    return null;
  }
}

function problemOf(event) {
  const problem = objectOf(event);
  const isStatus = Number.isInteger(problem.status) && problem.status >= 400 && problem.status <= 599;
  return new DurableProblem(problem, isStatus ? problem.status : 500);
}

function dataOf(event) {
  try {
    return JSON.parse(event.data);
  } catch {
    throw new UnexpectedAnswer(`the data of a frame \`${event.type}\` is not JSON that can be read`);
  }
}

function objectOf(event) {
  const value = dataOf(event);
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new UnexpectedAnswer(`the data of a frame \`${event.type}\` is no object`);
  }
  return value;
}

function whole(digits) {
  if (!/^[0-9]{1,19}$/.test(digits)) throw new UnexpectedAnswer("a frame does not say where it stands in the stream");
  return BigInt(digits);
}

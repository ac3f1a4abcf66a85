"""A relay's producer that is discarded: nothing more is sent, and nobody waits for an answer."""

import asyncio

import pytest

from relay.producer import Producer, ProducerDiscarded


async def test_an_answer_that_came_in_the_same_turn_keeps_the_others_from_nothing() -> None:
    producer = Producer(bootstrap_servers="127.0.0.1:1", client_id="test", compression="none", may_send=lambda: True)
    loop = asyncio.get_running_loop()
    answers: list[asyncio.Future[int]] = [loop.create_future() for _ in range(20)]
    producer._answers.update(answers)
    for came in answers[::2]:
        came.set_result(7)  # it is taken out in the next turn of the loop
    await producer.discard()
    assert [answer.result() for answer in answers[::2]] == [7] * 10
    for answer in answers[1::2]:
        with pytest.raises(ProducerDiscarded):
            await answer
    assert not producer.alive

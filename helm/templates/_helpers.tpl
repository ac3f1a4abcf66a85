{{/* The chart's name in labels. */}}
{{- define "fencepost.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The name of the resources. 52 characters, so that "-migrate" and the names that Kubernetes derives still fit. */}}
{{- define "fencepost.fullname" -}}
{{- $name := include "fencepost.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The labels that a selector may use: they never change while a release lives. */}}
{{- define "fencepost.selectorLabels" -}}
app.kubernetes.io/name: {{ include "fencepost.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "fencepost.labels" -}}
{{ include "fencepost.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "fencepost.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "fencepost.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "fencepost.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* What both pods share: no token, no root, and no variables that Kubernetes derives from services. A service named
     "fencepost-http" would otherwise set FENCEPOST_HTTP_PORT. */}}
{{- define "fencepost.podBasics" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with .Values.securityContext.runAsUser }}
  runAsUser: {{ int64 . }}
  runAsGroup: {{ int64 . }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "fencepost.containerBasics" -}}
image: {{ include "fencepost.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  privileged: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop:
      - ALL
{{- end }}

{{/* The database URL, by reference. */}}
{{- define "fencepost.databaseUrl" -}}
- name: FENCEPOST_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .key | quote }}
{{- end }}

{{/* relay.settings as environment variables: pollIntervalMs is FENCEPOST_POLL_INTERVAL_MS. Numbers go through JSON,
     since a template prints a large one as 3.3554432e+07. */}}
{{- define "fencepost.settings" -}}
{{- range $name, $value := .Values.relay.settings }}
{{- $text := kindIs "string" $value | ternary $value (toJson $value) }}
{{- if not (or (kindIs "invalid" $value) (eq $text "")) }}
- name: FENCEPOST_{{ $name | snakecase | upper }}
  value: {{ $text | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Longer than the relay's own grace, so that it is the relay that ends its stop and not a SIGKILL. */}}
{{- define "fencepost.terminationGracePeriodSeconds" -}}
{{- add (ceil .Values.relay.settings.stopGraceSeconds | int64) 10 }}
{{- end }}

{{/* Relations between values, which a schema can't say. The relay refuses them too, but only once it runs. */}}
{{- define "fencepost.validate" -}}
{{- with .Values.relay.settings }}
{{- if ge (addf .publishDeadlineSeconds .leaseMarginSeconds) (float64 .leaseSeconds) }}
{{- fail (printf "relay.settings: publishDeadlineSeconds (%v) + leaseMarginSeconds (%v) must be less than leaseSeconds (%v)" .publishDeadlineSeconds .leaseMarginSeconds .leaseSeconds) }}
{{- end }}
{{- end }}
{{- end }}

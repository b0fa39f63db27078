{{- define "foretell.labels" -}}
{{ include "foretell.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "foretell.selector" -}}
app.kubernetes.io/name: foretell
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.shape }}
{{- end }}

{{/* Port of an `IP:PORT`. */}}
{{- define "foretell.port" -}}
{{- . | splitList ":" | last -}}
{{- end }}

{{- define "foretell.clientPort" -}}
{{- include "foretell.port" (first .Values.process.listen).address -}}
{{- end }}

{{/* `yes` if there is a tokenizer, from the hub or from a volume. */}}
{{- define "foretell.hasTokenizer" -}}
{{- if or .Values.tokenizer.model .Values.tokenizer.volume }}yes{{ end -}}
{{- end }}

{{/* Fetches the tokenizer if no volume has it. */}}
{{- define "foretell.tokenizer" -}}
{{- if and .Values.tokenizer.model (not .Values.tokenizer.volume) -}}
name: tokenizer
image: {{ .Values.tokenizer.image | default .Values.engine.image | required "tokenizer.image" | quote }}
command:
  - python3
  - -c
  - | {{- .Files.Get "files/tokenizer.py" | replace "@MODEL@" .Values.tokenizer.model | replace "@REVISION@" .Values.tokenizer.revision | trim | nindent 4 }}
{{- with .Values.tokenizer.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
resources: { requests: { cpu: 100m, memory: 64Mi }, limits: { memory: 256Mi } }
{{ include "foretell.confined" . }}
volumeMounts: [{ name: tokenizer, mountPath: /tokenizer }]
{{- end -}}
{{- end }}

{{/* The config file: the values, and the settings that follow from the shape. */}}
{{- define "foretell.process" -}}
{{- $process := deepCopy .Values.process -}}
{{- $backend := deepCopy .Values.backend -}}
{{- if eq .Values.shape "sidecar" -}}
{{- $_ := set $backend "replicas" (list (printf "http://127.0.0.1:%v" .Values.engine.port)) -}}
{{- else -}}
{{- $_ := set $backend "replicas" (dict "dns" (printf "%s-engines:%v" .Release.Name .Values.engine.port) "every" "5s") -}}
{{- end -}}
{{- if include "foretell.hasTokenizer" . -}}
{{- $_ := set $backend "models" (list (dict "id" "*" "tokenizer" "/tokenizer")) -}}
{{- end -}}
{{- if .Values.secrets.engineKey -}}
{{- $auth := dict "auth" (dict "own_token_file" "/run/secrets/foretell/engine-key") -}}
{{- $_ := set $backend "connect" (mergeOverwrite (dict) $auth ($backend.connect | default dict)) -}}
{{- end -}}
{{- if .Values.secrets.adminToken -}}
{{- $_ := set $process.admin "token_file" "/run/secrets/foretell/admin-token" -}}
{{- end -}}
{{- $_ := set $process "backends" (list $backend) -}}
{{- $_ := set $process "policies" (dict "dir" "/etc/foretell/policies") -}}
{{- toYaml $process -}}
{{- end }}

{{/* Foretell's container, the same in both shapes. */}}
{{- define "foretell.container" -}}
name: foretell
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [serve, --config, /etc/foretell/process/foretell.yaml]
ports:
  - { name: http, containerPort: {{ include "foretell.clientPort" . }} }
  - { name: metrics, containerPort: {{ include "foretell.port" .Values.process.metrics.address }} }
# All on the metrics listener: the admin interface is on loopback, which the kubelet cannot reach.
# Startup and liveness do not depend on the engine: in the sidecar's pod it starts later.
startupProbe:
  httpGet: { path: /healthz, port: metrics }
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: { path: /healthz, port: metrics }
  periodSeconds: 10
  failureThreshold: 3
readinessProbe:
  httpGet: { path: /readyz, port: metrics }
  periodSeconds: 5
  failureThreshold: 2
resources: {{- toYaml .Values.resources | nindent 2 }}
{{ include "foretell.confined" . }}
volumeMounts:
  # Folders, never subPath: a file that is mounted by subPath is never updated.
  - { name: process, mountPath: /etc/foretell/process, readOnly: true }
  - { name: policies, mountPath: /etc/foretell/policies, readOnly: true }
  {{- if include "foretell.hasTokenizer" . }}
  - { name: tokenizer, mountPath: /tokenizer, readOnly: true }
  {{- end }}
  {{- with include "foretell.secretMount" . }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "foretell.confined" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: { drop: [ALL] }
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "foretell.secretMount" -}}
{{- if or .Values.secrets.adminToken .Values.secrets.engineKey -}}
- { name: secrets, mountPath: /run/secrets/foretell, readOnly: true }
{{- end -}}
{{- end }}

{{- define "foretell.volumes" -}}
- { name: process, configMap: { name: {{ .Release.Name }}-foretell } }
- { name: policies, configMap: { name: {{ .Release.Name }}-foretell-policies } }
{{- if include "foretell.hasTokenizer" . }}
- name: tokenizer
  {{- .Values.tokenizer.volume | default (dict "emptyDir" (dict "sizeLimit" "256Mi")) | toYaml | nindent 2 }}
{{- end }}
{{- if or .Values.secrets.adminToken .Values.secrets.engineKey }}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- with .Values.secrets.adminToken }}
      - secret: { name: {{ . }}, items: [{ key: token, path: admin-token }] }
      {{- end }}
      {{- with .Values.secrets.engineKey }}
      - secret: { name: {{ . }}, items: [{ key: token, path: engine-key }] }
      {{- end }}
{{- end }}
{{- end }}

{{/* The engine's preStop, as one string. */}}
{{- define "foretell.drain" -}}
{{- .Files.Get "files/drain.py"
  | replace "@TOKEN@" "/run/secrets/foretell/admin-token"
  | replace "@PORT@" (include "foretell.port" .Values.process.admin.address)
  | replace "@SECONDS@" (sub .Values.terminationGracePeriodSeconds 30 | toString)
  | trim -}}
{{- end }}

{{/* The patch of the Service that sends clients past Foretell. */}}
{{- define "foretell.rollback" -}}
{{- $spec := dict "ports" (list (dict "port" .Values.service.port "targetPort" .Values.engine.port)) -}}
{{- if eq .Values.shape "gateway" -}}
{{- $selector := deepCopy .Values.engine.selector -}}
{{- range $label, $_ := include "foretell.selector" . | fromYaml -}}
{{- if not (hasKey $selector $label) }}{{ $_ := set $selector $label nil }}{{ end -}}
{{- end -}}
{{- $_ := set $spec "selector" $selector -}}
{{- end -}}
{{- dict "spec" $spec | toJson -}}
{{- end }}

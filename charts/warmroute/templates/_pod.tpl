{{/*
What every pod has.
*/}}

{{/* A settings map as flags, one a line: true --x, false --no-x, lists with commas. Large numbers come as floats. */}}
{{- define "warmroute.flags" -}}
{{- range $key := keys . | sortAlpha }}
{{- $value := index $ $key }}
{{- $flag := printf "--%s" ($key | replace "_" "-") }}
{{- if kindIs "bool" $value }}
- {{ ternary $flag (printf "--no-%s" (trimPrefix "--" $flag)) $value }}
{{- else if kindIs "slice" $value }}
- {{ printf "%s=%s" $flag (join "," $value) | quote }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- {{ printf "%s=%.0f" $flag $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* (dict "chart" LIST "extra" LIST): each name once, the extra one where both have it. Server-side apply refuses a name
given twice. One that replaces the chart's stands where the chart's did, after the extra ones that are before it: a
variable may refer to those above it alone. */}}
{{- define "warmroute.env" -}}
{{- $byName := dict }}
{{- $extras := list }}
{{- range concat .chart .extra }}
{{- $_ := set $byName .name . }}
{{- end }}
{{- range .extra }}
{{- $extras = append $extras .name }}
{{- end }}
{{- $names := list }}
{{- range .chart }}
{{- if has .name $extras }}
{{- $isBefore := true }}
{{- $own := .name }}
{{- range $extras }}
{{- $isBefore = and $isBefore (ne . $own) }}
{{- if $isBefore }}
{{- $names = append $names . }}
{{- end }}
{{- end }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- $names = concat $names $extras }}
{{- $env := list }}
{{- range uniq $names }}
{{- $env = append $env (index $byName .) }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{- define "warmroute.podSecurityContext" -}}
{{- $chart := dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001
  "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- toYaml (mergeOverwrite $chart (deepCopy .podSecurityContext)) }}
{{- end }}

{{- define "warmroute.securityContext" -}}
{{- $chart := dict "allowPrivilegeEscalation" false "privileged" false "readOnlyRootFilesystem" true
  "capabilities" (dict "drop" (list "ALL")) }}
{{- toYaml (mergeOverwrite $chart (deepCopy .securityContext)) }}
{{- end }}

{{/* Where the pod runs: (dict "root" $ "component" C "values" VALUES [ "model" NAME "tolerations" MORE ]) */}}
{{- define "warmroute.scheduling" -}}
{{- $values := .values }}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
enableServiceLinks: false
securityContext:
  {{- include "warmroute.podSecurityContext" $values | nindent 2 }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat $values.tolerations (.tolerations | default list) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or $values.topologySpread $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- if $values.topologySpread }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "warmroute.selectorLabels" . | nindent 8 }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* (dict "path" P "probe" VALUES) */}}
{{- define "warmroute.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
{{ toYaml .probe }}
{{- end }}

{{/* Seconds between the decision to stop a pod and its end: (dict "root" $ "values" VALUES). */}}
{{- define "warmroute.gracePeriod" -}}
{{- $computed := add .values.drain.delaySeconds .root.Values.longestAnswerSeconds .values.drain.marginSeconds }}
{{- .values.terminationGracePeriodSeconds | default $computed | int }}
{{- end }}

{{/* Environment by which gateways and engines find Redis: a list, empty without one. */}}
{{- define "warmroute.redisEnv" -}}
{{- $env := list }}
{{- $external := .Values.externalRedis }}
{{- if .Values.redis.enabled }}
{{- $host := printf "%s.%s" (include "warmroute.componentName" (dict "root" . "component" "redis")) (include "warmroute.namespace" .) }}
{{- if .Values.redis.auth.enabled }}
{{- $ref := dict "name" (include "warmroute.redisSecret" .) "key" .Values.redis.auth.secretKey }}
{{- $env = append $env (dict "name" "REDIS_PASSWORD" "valueFrom" (dict "secretKeyRef" $ref)) }}
{{- $env = append $env (dict "name" "WARMROUTE_REDIS_URL" "value" (printf "redis://:$(REDIS_PASSWORD)@%s:6379/0" $host)) }}
{{- else }}
{{- $env = append $env (dict "name" "WARMROUTE_REDIS_URL" "value" (printf "redis://%s:6379/0" $host)) }}
{{- end }}
{{- else if $external.existingSecret }}
{{- $ref := dict "name" $external.existingSecret "key" $external.secretKey }}
{{- $env = append $env (dict "name" "WARMROUTE_REDIS_URL" "valueFrom" (dict "secretKeyRef" $ref)) }}
{{- else if $external.url }}
{{- $env = append $env (dict "name" "WARMROUTE_REDIS_URL" "value" $external.url) }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{- define "warmroute.redisSecret" -}}
{{- .Values.redis.auth.existingSecret | default (include "warmroute.componentName" (dict "root" . "component" "redis")) }}
{{- end }}

{{/* Changes when a pod must be replaced for what is not in its own template. From the values and not from the Secrets: a
password made at install is another one each time a template is rendered without the cluster. Not the API keys: gateways read
their file again by themselves. */}}
{{- define "warmroute.checksum" -}}
{{- list .Values.redis.enabled .Values.redis.auth .Values.externalRedis | toJson | sha256sum }}
{{- end }}

{{- define "warmroute.hasApiKeys" -}}
{{- if or .Values.gateway.apiKeys.keys .Values.gateway.apiKeys.existingSecret }}true{{ end }}
{{- end }}

{{- define "warmroute.apiKeysSecret" -}}
{{- .Values.gateway.apiKeys.existingSecret | default (include "warmroute.componentName" (dict "root" . "component" "api-keys")) }}
{{- end }}

{{/*
Parts of every pod.
*/}}

{{/*
A settings map as flags, one per line. true gives --x, false gives --no-x, and a list's values are separated by commas. Helm has large numbers as floats.
YAML reads `prefix_cache: off` as false, which the engine regards as off.
*/}}
{{- define "warmroute.flags" -}}
{{- range $key := keys . | sortAlpha }}
{{- $value := index $ $key }}
{{- $flag := printf "--%s" ($key | replace "_" "-") }}
{{- if and (kindIs "bool" $value) (ne $key "prefix_cache") }}
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

{{/* (dict "chart" LIST "extra" LIST): each name once, from the extra list if both have it. Server-side apply refuses a name
that is given twice. An extra variable that replaces one of the chart's is put in that one's place. The extra variables listed
before it are put there, too, because a variable may only refer to variables above it. */}}
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

{{/* (dict "path" P "probe" VALUES [ "scheme" S ]) */}}
{{- define "warmroute.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- with .scheme }}
  scheme: {{ . }}
  {{- end }}
{{ toYaml .probe }}
{{- end }}

{{/* Seconds between the decision to stop a pod and its end: (dict "root" $ "values" VALUES). */}}
{{- define "warmroute.gracePeriod" -}}
{{- $computed := add .values.drain.delaySeconds .root.Values.longestAnswerSeconds .values.drain.marginSeconds }}
{{- .values.terminationGracePeriodSeconds | default $computed | int }}
{{- end }}

{{/* List of the variables by which gateways and engines find Redis: (dict "root" $ "role" "gateway"); empty without a Redis. */}}
{{- define "warmroute.redisEnv" -}}
{{- $env := list }}
{{- $redis := .root.Values.redis }}
{{- $external := .root.Values.externalRedis }}
{{- $roleKey := printf "%sKey" .role }}
{{- $ca := "ssl_ca_certs=/etc/warmroute/redis-ca/ca.crt" }}
{{- if $redis.enabled }}
{{- $name := include "warmroute.componentName" (dict "root" .root "component" "redis") }}
{{- $host := printf "%s.%s" $name (include "warmroute.namespace" .root) }}
{{- $user := "" }}
{{- if $redis.auth.enabled }}
{{- $key := ternary (index $redis.auth $roleKey) $redis.auth.secretKey $redis.auth.users }}
{{- $ref := dict "name" (include "warmroute.redisSecret" .root) "key" $key }}
{{- $env = append $env (dict "name" "REDIS_PASSWORD" "valueFrom" (dict "secretKeyRef" $ref)) }}
{{- $user = printf "%s:$(REDIS_PASSWORD)@" (ternary .role "" $redis.auth.users) }}
{{- end }}
{{- $url := printf "redis://%s%s:6379/0" $user $host }}
{{- if $redis.tls.existingSecret }}
{{- $url = printf "rediss://%s%s:6379/0?%s" $user $host $ca }}
{{- end }}
{{- $env = append $env (dict "name" "WARMROUTE_REDIS_URL" "value" $url) }}
{{- else if $external.existingSecret }}
{{- $ref := dict "name" $external.existingSecret "key" (index $external $roleKey | default $external.secretKey) }}
{{- $env = append $env (dict "name" "WARMROUTE_REDIS_URL" "valueFrom" (dict "secretKeyRef" $ref)) }}
{{- else if $external.url }}
{{- $url := $external.url }}
{{- if and $external.caSecret (not (contains "ssl_ca_certs=" $url)) }}
{{- $url = printf "%s%s%s" $url (ternary "&" "?" (contains "?" $url)) $ca }}
{{- end }}
{{- $env = append $env (dict "name" "WARMROUTE_REDIS_URL" "value" $url) }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{/* JSON: the Secret, and its entry, with the authority that signed Redis' certificate; empty: the system's authorities. */}}
{{- define "warmroute.redisCa" -}}
{{- $external := .Values.externalRedis }}
{{- if .Values.redis.enabled }}
{{- with .Values.redis.tls.existingSecret }}{{ dict "secret" . "key" "ca.crt" | toJson }}{{ end }}
{{- else if $external.caSecret }}
{{- dict "secret" $external.caSecret "key" $external.caKey | toJson }}
{{- end }}
{{- end }}

{{- define "warmroute.redisCaMount" -}}
{{- if include "warmroute.redisCa" . }}
- {name: redis-ca, mountPath: /etc/warmroute/redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "warmroute.redisCaVolume" -}}
{{- with include "warmroute.redisCa" . }}
{{- $ca := fromJson . }}
- {name: redis-ca, secret: {secretName: {{ $ca.secret | quote }}, items: [{key: {{ $ca.key | quote }}, path: ca.crt}]}}
{{- end }}
{{- end }}

{{/* JSON list: the Secrets with keys that gateways send to engines: volume, folder, secret, key. */}}
{{- define "warmroute.engineKeys" -}}
{{- $keys := list }}
{{- with .Values.engines.apiKey }}
{{- if .existingSecret }}
{{- $keys = append $keys (dict "volume" "engine-api-key" "folder" "/etc/warmroute/engine-api-key" "secret" .existingSecret "key" .secretKey) }}
{{- end }}
{{- end }}
{{- range $i, $set := include "warmroute.existing" . | fromJsonArray }}
{{- if $set.apiKeySecret }}
{{- $keys = append $keys (dict "volume" (printf "engine-api-key-%d" $i) "folder" (printf "/etc/warmroute/engine-api-keys/%s" $set.name) "secret" $set.apiKeySecret "key" $set.apiKeySecretKey) }}
{{- end }}
{{- end }}
{{- toJson $keys }}
{{- end }}

{{/* Whether the gateways' port for operators can be reached from outside the pod. */}}
{{- define "warmroute.opensAdmin" -}}
{{- if or .Values.networkPolicy.adminFrom .Values.loadgen.enabled }}true{{ end }}
{{- end }}

{{/* What a pod of the chart needs to speak https to the gateways: environment, mount and volume. */}}
{{- define "warmroute.gatewayCa" -}}
{{- if .Values.gateway.tls.existingSecret }}{{ .Values.gateway.tls.caKey }}{{ end }}
{{- end }}

{{- define "warmroute.gatewayCaEnv" -}}
{{- if include "warmroute.gatewayCa" . -}}
- {name: SSL_CERT_FILE, value: /etc/warmroute/gateway-ca/ca.crt}
{{- end }}
{{- end }}

{{- define "warmroute.gatewayCaMount" -}}
{{- if include "warmroute.gatewayCa" . -}}
- {name: gateway-ca, mountPath: /etc/warmroute/gateway-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "warmroute.gatewayCaVolume" -}}
{{- with include "warmroute.gatewayCa" . -}}
- {name: gateway-ca, secret: {secretName: {{ $.Values.gateway.tls.existingSecret | quote }}, items: [{key: {{ . | quote }}, path: ca.crt}]}}
{{- end }}
{{- end }}

{{- define "warmroute.redisSecret" -}}
{{- .Values.redis.auth.existingSecret | default (include "warmroute.componentName" (dict "root" . "component" "redis")) }}
{{- end }}

{{/* A hash that changes if a pod must be replaced because of something outside its own template. It is computed from values and
not from Secrets, because a password made at install differs each time that a template is rendered without the cluster. API keys are
not part of it: gateways read their file again by themselves. */}}
{{- define "warmroute.checksum" -}}
{{- list .Values.redis.enabled .Values.redis.auth .Values.redis.tls .Values.externalRedis | toJson | sha256sum }}
{{- end }}

{{- define "warmroute.hasApiKeys" -}}
{{- if or .Values.gateway.apiKeys.keys .Values.gateway.apiKeys.existingSecret }}true{{ end }}
{{- end }}

{{- define "warmroute.hasTenants" -}}
{{- if or .Values.gateway.tenants.list .Values.gateway.tenants.existingSecret }}true{{ end }}
{{- end }}

{{- define "warmroute.tenantsSecret" -}}
{{- .Values.gateway.tenants.existingSecret | default (include "warmroute.componentName" (dict "root" . "component" "tenants")) }}
{{- end }}

{{- define "warmroute.apiKeysSecret" -}}
{{- .Values.gateway.apiKeys.existingSecret | default (include "warmroute.componentName" (dict "root" . "component" "api-keys")) }}
{{- end }}

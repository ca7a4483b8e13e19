{{/*
vLLM and SGLang: what their containers get. (dict "root" $ "model" MODEL "source" SOURCE)
*/}}

{{- define "warmroute.isForeign" -}}
{{- if ne .engine "warmroute" }}true{{ end }}
{{- end }}

{{/* JSON list: the kinds of engines other than the bundled one that the models use, each once. */}}
{{- define "warmroute.foreignKinds" -}}
{{- $kinds := list }}
{{- range include "warmroute.models" . | fromJson }}
{{- if include "warmroute.isForeign" . }}
{{- $kinds = append $kinds .engine }}
{{- end }}
{{- end }}
{{- $kinds | uniq | sortAlpha | toJson }}
{{- end }}

{{/* The engine's settings as flags, one per line. true gives --x, false no flag, a list --x followed by its values, a map its JSON. */}}
{{- define "warmroute.foreignFlags" -}}
{{- range $key := keys . | sortAlpha }}
{{- $value := index $ $key }}
{{- $flag := printf "--%s" ($key | replace "_" "-") }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- {{ $flag }}
{{- end }}
{{- else if kindIs "slice" $value }}
- {{ $flag }}
{{- range $value }}
- {{ toString . | quote }}
{{- end }}
{{- else if kindIs "map" $value }}
- {{ printf "%s=%s" $flag (toJson $value) | quote }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- {{ printf "%s=%.0f" $flag $value | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "warmroute.kvEventsConfig" -}}
{{- $events := .kvEvents }}
{{- $config := dict "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int $events.port)) "replay_endpoint" (printf "tcp://*:%d" (int $events.replayPort)) }}
{{- if eq .engine "vllm" }}
{{- $_ := set $config "enable_kv_cache_events" true }}
{{- end }}
{{- toJson $config }}
{{- end }}

{{/* The command, with all of its arguments; images of one engine differ in their entry points. */}}
{{- define "warmroute.foreignCommand" -}}
{{- if eq .model.engine "vllm" -}}
[vllm, serve]
{{- else -}}
[python3, -m, sglang.launch_server]
{{- end }}
{{- end }}

{{- define "warmroute.foreignArgs" -}}
{{- $model := .model }}
{{- $isVllm := eq $model.engine "vllm" }}
{{- if $isVllm }}
- {{ .source.folder | quote }}
{{- else }}
- {{ printf "--model-path=%s" .source.folder | quote }}
{{- end }}
- {{ printf "--served-model-name=%s" $model.servedModelName | quote }}
- --host=0.0.0.0
- --port=8000
{{- if $isVllm }}
- --enable-prefix-caching
# Answers say how many of their prompt's tokens were reused, streams too.
- --enable-prompt-tokens-details
- --enable-force-include-usage
# Otherwise an answer that is not finished at SIGTERM is dropped.
- --shutdown-timeout={{ .root.Values.longestAnswerSeconds }}
{{- else }}
# Answers say how many of their prompt's tokens were reused, streams too.
- --enable-cache-report
- --stream-response-default-include-usage
- --enable-metrics
{{- if eq $model.device "cpu" }}
- --device=cpu
{{- end }}
{{- end }}
{{- if $model.kvEvents.enabled }}
- {{ printf "--kv-events-config=%s" (include "warmroute.kvEventsConfig" $model) | quote }}
{{- end }}
{{- if gt (int $model.tensorParallel) 1 }}
- {{ ternary "--tensor-parallel-size" "--tp-size" $isVllm }}={{ int $model.tensorParallel }}
{{- end }}
{{- if gt (int $model.dataParallel) 1 }}
- {{ ternary "--data-parallel-size" "--dp-size" $isVllm }}={{ int $model.dataParallel }}
{{- end }}
{{- with $model.maxModelLen }}
- {{ ternary "--max-model-len" "--context-length" $isVllm }}={{ int . }}
{{- end }}
{{- if and .root.Values.engines.apiKey.existingSecret (not $isVllm) }}
# SGLang reads no key from a variable.
- --api-key=$(WARMROUTE_ENGINE_KEY)
{{- end }}
{{- include "warmroute.foreignFlags" $model.flags }}
{{- with $model.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* JSON list. These engines write only below /tmp, because the root is read-only and the user is not in /etc/passwd. */}}
{{- define "warmroute.foreignEnv" -}}
{{- $model := .model }}
{{- $env := list }}
{{- range $name, $value := dict "HOME" "/tmp" "USER" "engine" "LOGNAME" "engine" "XDG_CACHE_HOME" "/tmp/.cache" "XDG_CONFIG_HOME" "/tmp/.config"
  "HF_HOME" "/tmp/huggingface" "TRITON_CACHE_DIR" "/tmp/triton" "TORCHINDUCTOR_CACHE_DIR" "/tmp/inductor" "FLASHINFER_WORKSPACE_BASE" "/tmp" }}
{{- $env = append $env (dict "name" $name "value" $value) }}
{{- end }}
{{- $kind := dict "SGLANG_CACHE_DIR" "/tmp/sglang" "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION" "false" }}
{{- if eq $model.engine "vllm" }}
{{- $kind = dict "VLLM_CACHE_ROOT" "/tmp/vllm" "VLLM_CONFIG_ROOT" "/tmp/vllm-config" "VLLM_NO_USAGE_STATS" "1" }}
{{- end }}
{{- range $name, $value := $kind }}
{{- $env = append $env (dict "name" $name "value" $value) }}
{{- end }}
{{- with .root.Values.engines.apiKey }}
{{- if .existingSecret }}
{{- $name := ternary "VLLM_API_KEY" "WARMROUTE_ENGINE_KEY" (eq $model.engine "vllm") }}
{{- $env = append $env (dict "name" $name "valueFrom" (dict "secretKeyRef" (dict "name" .existingSecret "key" .secretKey))) }}
{{- end }}
{{- end }}
{{- toJson $env }}
{{- end }}

{{- define "warmroute.foreignPorts" -}}
{{- $model := .model }}
- {name: http, containerPort: 8000, protocol: TCP}
{{- if $model.kvEvents.enabled }}
{{- range $rank := until (int $model.dataParallel) }}
{{- $suffix := ternary "" (printf "-%d" $rank) (eq $rank 0) }}
- {name: kv-events{{ $suffix }}, containerPort: {{ add $model.kvEvents.port $rank }}, protocol: TCP}
- {name: kv-replay{{ $suffix }}, containerPort: {{ add $model.kvEvents.replayPort $rank }}, protocol: TCP}
{{- end }}
{{- end }}
{{- end }}

{{/* JSON: what the pod tells gateways about itself. */}}
{{- define "warmroute.foreignAnnotations" -}}
{{- $model := .model }}
{{- $said := dict }}
{{- if $model.kvEvents.enabled }}
{{- $_ := set $said "warmroute.io/kv-events-port" (toString (int $model.kvEvents.port)) }}
{{- $_ := set $said "warmroute.io/kv-events-replay-port" (toString (int $model.kvEvents.replayPort)) }}
{{- end }}
{{- if gt (int $model.dataParallel) 1 }}
{{- $_ := set $said "warmroute.io/ranks" (toString (int $model.dataParallel)) }}
{{- end }}
{{- toJson (mergeOverwrite $said (deepCopy $model.podAnnotations)) }}
{{- end }}

{{/* /health answers 503, or nothing, until the model is loaded. SGLang's /health would generate a token and take a second, so a
variable makes it cheap. The liveness probe of SGLang uses /health_generate, which needs 20 seconds to report a failure. */}}
{{- define "warmroute.foreignProbes" -}}
{{- $model := .model }}
{{- $startup := dict "periodSeconds" 1 "timeoutSeconds" 2 "failureThreshold" $model.loadTimeoutSeconds }}
startupProbe:
  {{- include "warmroute.probe" (dict "path" "/health" "probe" $startup) | nindent 2 }}
readinessProbe:
  {{- include "warmroute.probe" (dict "path" "/health" "probe" $model.probes.readiness) | nindent 2 }}
livenessProbe:
  {{- if eq $model.engine "vllm" }}
  {{- include "warmroute.probe" (dict "path" "/health" "probe" $model.probes.liveness) | nindent 2 }}
  {{- else }}
  {{- $liveness := mergeOverwrite (deepCopy $model.probes.liveness) (dict "periodSeconds" (max 30 (int $model.probes.liveness.periodSeconds)) "timeoutSeconds" (max 25 (int $model.probes.liveness.timeoutSeconds))) }}
  {{- include "warmroute.probe" (dict "path" "/health_generate" "probe" $liveness) | nindent 2 }}
  {{- end }}
{{- end }}

{{/* GPUs of a pod. */}}
{{- define "warmroute.gpuCount" -}}
{{- .gpu.count | default (mul (int .tensorParallel) (int .dataParallel)) | int }}
{{- end }}

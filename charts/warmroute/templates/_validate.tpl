{{/*
If values contradict each other, the render ends here, with the value and the remedy. values.schema.json checks each
value by itself.
*/}}

{{- define "warmroute.validate" -}}
{{- include "warmroute.validateEngines" . }}
{{- include "warmroute.validateGateway" . }}
{{- include "warmroute.validateRedis" . }}
{{- include "warmroute.validateLoadgen" . }}
{{- if include "warmroute.picks" . }}
{{- include "warmroute.validatePicker" . }}
{{- end }}
{{- range $name, $model := include "warmroute.models" . | fromJson }}
{{- include "warmroute.validateModel" (dict "root" $ "path" (printf "models.%s" $name) "values" $model) }}
{{- end }}
{{- end }}

{{- define "warmroute.validateEngines" -}}
{{- $given := .Values.engines.existing | default list }}
{{- if and (kindIs "map" $given) (not $given.selector) }}
{{- range $key, $value := omit $given "selector" "apiKeySecretKey" }}
{{- if and $value (ne (toString $value) "http") }}
{{- fail (printf "engines.existing.%s is set without engines.existing.selector: give the labels of the engines' pods, e.g. engines.existing.selector.app=vllm" $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- $names := list }}
{{- range $i, $set := include "warmroute.existing" . | fromJsonArray }}
{{- $path := ternary "engines.existing" (printf "engines.existing[%d]" $i) (kindIs "map" $given) }}
{{- if not $set.selector }}
{{- fail (printf "%s.selector is empty: give the labels of the engines' pods, e.g. {app: vllm}" $path) }}
{{- end }}
{{- if and $set.onlyModel (not $set.model) }}
{{- fail (printf "%s.onlyModel needs %s.model: the one model for which requests are sent there" $path $path) }}
{{- end }}
{{- if and $set.kvEventsReplayPort (not $set.kvEventsPort) }}
{{- fail (printf "%s.kvEventsReplayPort needs %s.kvEventsPort: the port of the events that are replayed" $path $path) }}
{{- end }}
{{- if has $set.name $names }}
{{- fail (printf "%s.name %q is the name of another set: give each its own" $path $set.name) }}
{{- end }}
{{- $names = append $names $set.name }}
{{- end }}
{{- if and (not .Values.engines.serviceAccount.create) (not .Values.engines.serviceAccount.name) }}
{{- fail "engines.serviceAccount.create is false and engines.serviceAccount.name is empty: name the ServiceAccount to use, e.g. default" }}
{{- end }}
{{- end }}

{{- define "warmroute.validateGateway" -}}
{{- $gateway := .Values.gateway }}
{{- include "warmroute.validateGrace" (dict "root" . "path" "gateway" "values" $gateway) }}
{{- if and (not $gateway.serviceAccount.create) (not $gateway.serviceAccount.name) }}
{{- fail "gateway.serviceAccount.create is false and gateway.serviceAccount.name is empty: name the ServiceAccount to use" }}
{{- end }}
{{- if and $gateway.apiKeys.keys $gateway.apiKeys.existingSecret }}
{{- fail "gateway.apiKeys.keys and gateway.apiKeys.existingSecret are both set: remove one of them" }}
{{- end }}
{{- if and $gateway.tenants.list $gateway.tenants.existingSecret }}
{{- fail "gateway.tenants.list and gateway.tenants.existingSecret are both set: remove one of them" }}
{{- end }}
{{- range $gateway.tenants.list }}
{{- if and (eq (toString .isolation) "tenant") (not $gateway.tenants.saltSecret) }}
{{- fail (printf "gateway.tenants.list: tenant %v has isolation: tenant, which needs gateway.tenants.saltSecret" .name) }}
{{- end }}
{{- end }}
{{- if and .Values.networkPolicy.adminFrom (not .Values.networkPolicy.enabled) }}
{{- fail "networkPolicy.adminFrom needs networkPolicy.enabled: without policies everybody in the cluster would reach the gateways' port for operators" }}
{{- end }}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.hosts) }}
{{- fail "gateway.ingress.enabled needs gateway.ingress.hosts: give at least one host name" }}
{{- end }}
{{- if and $gateway.httpRoute.enabled (not $gateway.httpRoute.parentRefs) }}
{{- fail "gateway.httpRoute.enabled needs gateway.httpRoute.parentRefs: name the Gateway, e.g. [{name: public}]" }}
{{- end }}
{{- if and $gateway.service.nodePort (eq $gateway.service.type "ClusterIP") }}
{{- fail "gateway.service.nodePort needs gateway.service.type NodePort or LoadBalancer" }}
{{- end }}
{{- $scaling := $gateway.autoscaling }}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- fail (printf "gateway.autoscaling.minReplicas (%v) is above gateway.autoscaling.maxReplicas (%v): raise maxReplicas" $scaling.minReplicas $scaling.maxReplicas) }}
{{- end }}
{{- end }}

{{- define "warmroute.validateGrace" -}}
{{- $given := .values.terminationGracePeriodSeconds }}
{{- $needed := add .values.drain.delaySeconds .root.Values.longestAnswerSeconds }}
{{- if and (not (kindIs "invalid" $given)) (le (int $given) (int $needed)) }}
{{- fail (printf "%s.terminationGracePeriodSeconds (%v) would cut off answers: it must be above %s.drain.delaySeconds + longestAnswerSeconds (%d); leave it empty to have it computed, or lower longestAnswerSeconds" .path $given .path $needed) }}
{{- end }}
{{- end }}

{{- define "warmroute.validateRedis" -}}
{{- $external := .Values.externalRedis }}
{{- if and .Values.redis.enabled (or $external.url $external.existingSecret) }}
{{- fail "redis.enabled is true and externalRedis is set: set redis.enabled=false to use the external one" }}
{{- end }}
{{- if and $external.url $external.existingSecret }}
{{- fail "externalRedis.url and externalRedis.existingSecret are both set: remove one of them" }}
{{- end }}
{{- if and (or $external.gatewayKey $external.engineKey) (not $external.existingSecret) }}
{{- fail "externalRedis.gatewayKey and externalRedis.engineKey are entries of externalRedis.existingSecret, which is empty: name the Secret" }}
{{- end }}
{{- if and .Values.redis.enabled $external.caSecret }}
{{- fail "redis.enabled is true and externalRedis.caSecret is set: use redis.tls.existingSecret, or set redis.enabled=false" }}
{{- end }}
{{- if contains "@" $external.url }}
{{- fail "externalRedis.url holds credentials, which everybody with the right to read pods would see: put the URL into a Secret and name it in externalRedis.existingSecret" }}
{{- end }}
{{- if and $external.url .Values.networkPolicy.enabled (not (hasPrefix "unix:" $external.url)) }}
{{- $isSentinel := contains "+sentinel:" $external.url }}
{{- range splitList "," (regexReplaceAll "^[a-z+]+://([^/?]*).*$" $external.url "$1") }}
{{- $port := regexFind ":[0-9]+$" . | trimPrefix ":" | default (ternary "26379" "6379" $isSentinel) }}
{{- if not (has $port (toStrings $.Values.networkPolicy.externalRedisPorts)) }}
{{- fail (printf "externalRedis.url has port %s, which networkPolicy.externalRedisPorts %v does not let through: add it there%s" $port $.Values.networkPolicy.externalRedisPorts (ternary ", beside the ports of the masters that the Sentinels name" "" $isSentinel)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.engines.apiKey.existingSecret (include "warmroute.existing" . | fromJsonArray) (not (include "warmroute.models" . | fromJson)) }}
{{- fail "engines.apiKey is the key of the chart's own engines, and models has none: use engines.existing[].apiKeySecret" }}
{{- end }}
{{- if and .Values.redis.auth.password .Values.redis.auth.existingSecret }}
{{- fail "redis.auth.password and redis.auth.existingSecret are both set: remove one of them" }}
{{- end }}
{{- end }}

{{- define "warmroute.validateLoadgen" -}}
{{- if .Values.loadgen.enabled }}
{{- if and (include "warmroute.hasTenants" .) (not (include "warmroute.hasApiKeys" .)) }}
{{- fail "loadgen.enabled with gateway.tenants needs a key for the comparison: give one in gateway.apiKeys, which is then the key of the tenant default" }}
{{- end }}
{{- if not .Values.gateway.settings.allow_policy_header }}
{{- fail "loadgen.enabled needs a gateway that lets requests choose the policy: set gateway.settings.allow_policy_header=true" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "warmroute.validateTiers" -}}
{{- $path := .path }}
{{- with .values.tiers }}
{{- range $key, $bytes := dict "disk" .disk.bytes "shared" .shared.bytes }}
{{- if and $bytes (not $.values.tiers.hostBytes) }}
{{- fail (printf "%s.tiers.%s.bytes needs %s.tiers.hostBytes: blocks pass through the host's memory" $path $key $path) }}
{{- end }}
{{- end }}
{{- if and .disk.storageClassName (ne .disk.volume "ephemeral") }}
{{- fail (printf "%s.tiers.disk.storageClassName is only for volume ephemeral, not %s: remove it" $path .disk.volume) }}
{{- end }}
{{- if and .shared.bytes (not .shared.claim) }}
{{- fail (printf "%s.tiers.shared.bytes needs %s.tiers.shared.claim: a PersistentVolumeClaim with access mode ReadWriteMany" $path $path) }}
{{- end }}
{{- if and (or .shared.claim .shared.subPath) (not .shared.bytes) }}
{{- fail (printf "%s.tiers.shared.bytes is 0, so its claim is not used: say how many bytes all pods together may keep there" $path) }}
{{- end }}
{{- if and .shared.bytes (eq $.values.device "sim") }}
{{- fail (printf "%s.tiers.shared cannot be used with device sim, which has no KV to share: remove it" $path) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "warmroute.validateModel" -}}
{{- $model := .values }}
{{- include "warmroute.validateGrace" . }}
{{- include "warmroute.validateKind" . }}
{{- include "warmroute.validateTiers" . }}
{{- if not $model.source }}
{{- fail (printf "%s.source is empty: say where the checkpoint is, e.g. hf://Qwen/Qwen3-8B, pvc://models/qwen3-8b, or random:// for a demo" .path) }}
{{- end }}
{{- $source := include "warmroute.source" $model.source | fromJson }}
{{- $kinds := dict "hf" "^[^/]+/[^/]+$" "pvc" "^[a-z0-9][-.a-z0-9]*$" "hostPath" "^/." "oci" "." "random" "^$" }}
{{- if not (hasKey $kinds $source.kind) }}
{{- fail (printf "%s.source %q is not of a known kind: it must begin with hf://, pvc://, hostPath:// (or /), oci:// or random://" .path $model.source) }}
{{- end }}
{{- if not (regexMatch (index $kinds $source.kind) $source.where) }}
{{- fail (printf "%s.source %q is not complete: it must be hf://ORG/REPO[@REVISION], pvc://CLAIM[/PATH], hostPath:///PATH, oci://IMAGE[#PATH] or random://" .path $model.source) }}
{{- end }}
{{- if and $model.checkpoint (ne $source.kind "random") }}
{{- fail (printf "%s.checkpoint is only for random://, and %s.source is %q: remove it" .path .path $model.source) }}
{{- end }}
{{- if and (eq $source.kind "oci") (not $model.imageVolumes) (semverCompare "<1.35.0-0" .root.Capabilities.KubeVersion.Version) }}
{{- fail (printf "%s.source %q needs image volumes, which Kubernetes has by default from 1.35 on (this is %s): use another source, or set %s.imageVolumes=true where the feature gate ImageVolume is on" .path $model.source .root.Capabilities.KubeVersion.Version .path) }}
{{- end }}
{{- $scaling := $model.autoscaling }}
{{- if $scaling.enabled }}
{{- if not $scaling.prometheusUrl }}
{{- fail (printf "%s.autoscaling.enabled needs %s.autoscaling.prometheusUrl: the Prometheus that scrapes the engines" .path .path) }}
{{- end }}
{{- $activation := dig "activation_timeout_s" 0 (.root.Values.gateway.settings | default dict) }}
{{- if and (not (int $scaling.minReplicas)) (not (float64 $activation)) }}
{{- fail (printf "%s.autoscaling.minReplicas is 0, and gateway.settings.activation_timeout_s is not set: set it to the seconds that a request may wait for the first pod, e.g. 600" .path) }}
{{- end }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{- fail (printf "%s.autoscaling.minReplicas (%v) is above maxReplicas (%v): raise maxReplicas" .path $scaling.minReplicas $scaling.maxReplicas) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Values that only one kind of engine has. */}}
{{- define "warmroute.validateKind" -}}
{{- $model := .values }}
{{- $path := .path }}
{{- $own := index .root.Values.models (trimPrefix "models." $path) | default dict }}
{{- if include "warmroute.isForeign" $model }}
{{- if eq $model.device "sim" }}
{{- fail (printf "%s.device is sim, which only the bundled engine has, and %s.engine is %s: give cuda or cpu" $path $path $model.engine) }}
{{- end }}
{{- if hasPrefix "random://" $model.source }}
{{- fail (printf "%s.source is random://, which only the bundled engine makes, and %s.engine is %s: give hf://, pvc://, hostPath:// or oci://" $path $path $model.engine) }}
{{- end }}
{{- if $own.tiers }}
{{- fail (printf "%s.tiers is only for the bundled engine, and %s.engine is %s: give that engine's own flags for KV in host memory in %s.flags" $path $path $model.engine $path) }}
{{- end }}
{{- if $own.settings }}
{{- fail (printf "%s.settings is only for the bundled engine, and %s.engine is %s: give that engine's flags in %s.flags" $path $path $model.engine $path) }}
{{- end }}
{{- $ports := list 8000 }}
{{- if $model.kvEvents.enabled }}
{{- range $rank := until (int $model.dataParallel) }}
{{- range list (add $model.kvEvents.port $rank) (add $model.kvEvents.replayPort $rank) }}
{{- if or (has (int .) $ports) (gt (int .) 65535) }}
{{- fail (printf "%s.kvEvents: port %d of rank %d is taken or above 65535: each of the %v ranks has port + rank and replayPort + rank, and 8000 is the port for requests" $path (int .) $rank $model.dataParallel) }}
{{- end }}
{{- $ports = append $ports (int .) }}
{{- end }}
{{- end }}
{{- end }}
{{- else }}
{{- range list "flags" "tensorParallel" "dataParallel" "maxModelLen" "kvEvents" }}
{{- if hasKey $own . }}
{{- fail (printf "%s.%s is only for vLLM and SGLang, and %s.engine is warmroute: %s" $path . $path (ternary (printf "use %s.settings" $path) "remove it" (eq . "flags"))) }}
{{- end }}
{{- end }}
{{- if and $model.gpu.count (ne (int $model.gpu.count) 1) }}
{{- fail (printf "%s.gpu.count is %v, and the bundled engine uses one: remove it" $path $model.gpu.count) }}
{{- end }}
{{- end }}
{{- end }}

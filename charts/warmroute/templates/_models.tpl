{{/*
Models: the entries of `models` on top of engines.defaults.
*/}}

{{/* JSON: name -> values, of the models that are enabled. */}}
{{- define "warmroute.models" -}}
{{- $models := dict }}
{{- range $name, $own := .Values.models }}
{{- $model := mergeOverwrite (deepCopy $.Values.engines.defaults) (deepCopy ($own | default dict)) }}
{{- if $model.enabled }}
{{- $_ := set $model "servedModelName" ($model.servedModelName | default $name) }}
{{- $_ := set $models $name $model }}
{{- end }}
{{- end }}
{{- toJson $models }}
{{- end }}

{{/* JSON list: the names by which clients know the models. */}}
{{- define "warmroute.modelNames" -}}
{{- $names := list }}
{{- range include "warmroute.models" . | fromJson }}
{{- $names = append $names .servedModelName }}
{{- end }}
{{- range include "warmroute.existing" . | fromJsonArray }}
{{- with .model }}
{{- $names = append $names . }}
{{- end }}
{{- end }}
{{- $names | uniq | sortAlpha | toJson }}
{{- end }}

{{/* JSON list: a PromQL pattern for each model that is allowed to have no pod. */}}
{{- define "warmroute.sleepingModels" -}}
{{- $patterns := list }}
{{- range include "warmroute.models" . | fromJson }}
{{- if and .autoscaling.enabled (not (int .autoscaling.minReplicas)) }}
{{- $patterns = append $patterns (regexQuoteMeta .servedModelName) }}
{{- end }}
{{- end }}
{{- toJson $patterns }}
{{- end }}

{{- define "warmroute.engineImage" -}}
{{- $isCuda := eq .model.device "cuda" }}
{{- $repository := ternary "warmroute/engine-cuda" "warmroute/engine-cpu" $isCuda }}
{{- $image := deepCopy .model.image }}
{{- if include "warmroute.isForeign" .model }}
{{- $ofKind := index .root.Values.engines.images .model.engine }}
{{- $repository = ternary $ofKind.repository ($ofKind.cpuRepository | default $ofKind.repository) $isCuda }}
{{- if not $image.tag }}
{{- $_ := set $image "tag" (printf "%s%s" $ofKind.tag (ternary "" ($ofKind.cpuTagSuffix | default "") $isCuda)) }}
{{- end }}
{{- end }}
{{- include "warmroute.image" (dict "root" .root "image" $image "repository" $repository) }}
{{- end }}

{{/* JSON list: the sets of pods in engines.existing, with all fields. A single set may be given as a mapping. */}}
{{- define "warmroute.existing" -}}
{{- $given := .Values.engines.existing | default list }}
{{- $sets := list }}
{{- range $i, $set := ternary (list $given) $given (kindIs "map" $given) }}
{{- $own := dict }}
{{- range $key, $value := $set }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
{{- $_ := set $own $key $value }}
{{- end }}
{{- end }}
{{- $defaults := dict "name" (printf "existing-%d" $i) "namespace" (include "warmroute.namespace" $) "port" "http" "apiKeySecretKey" "api-key" "model" "" "apiKeySecret" "" "selector" dict }}
{{- if or $own.selector (not (kindIs "map" $given)) }}
{{- $sets = append $sets (mergeOverwrite $defaults $own) }}
{{- end }}
{{- end }}
{{- toJson $sets }}
{{- end }}

{{/* The first model that a set of existing engines names; empty if no set names one. */}}
{{- define "warmroute.existingModel" -}}
{{- $model := "" }}
{{- range include "warmroute.existing" . | fromJsonArray }}
{{- $model = $model | default .model }}
{{- end }}
{{- $model }}
{{- end }}

{{/* JSON list for the gateways' --kube-targets: the chart's own engines, if there are any, then the existing ones. */}}
{{- define "warmroute.targets" -}}
{{- $targets := list }}
{{- /* If one set is behind https, each set says whether it is. Otherwise the setting of the certificates' authority would mean https for all. */}}
{{- $hasTls := false }}
{{- range include "warmroute.existing" . | fromJsonArray }}
{{- $hasTls = or $hasTls (eq true .tls) }}
{{- end }}
{{- if include "warmroute.models" . | fromJson }}
{{- $own := dict "selector" (include "warmroute.selectorTerms" (include "warmroute.selectorLabels" (dict "root" . "component" "engine") | fromYaml)) "namespace" (include "warmroute.namespace" .) "port" "http" }}
{{- if $hasTls }}
{{- $_ := set $own "tls" false }}
{{- end }}
{{- if .Values.engines.apiKey.existingSecret }}
{{- $_ := set $own "api_key_file" (printf "/etc/warmroute/engine-api-key/%s" .Values.engines.apiKey.secretKey) }}
{{- end }}
{{- $targets = append $targets $own }}
{{- end }}
{{- range include "warmroute.existing" . | fromJsonArray }}
{{- $target := include "warmroute.target" . | fromJson }}
{{- if $hasTls }}
{{- $_ := set $target "tls" (eq true .tls) }}
{{- end }}
{{- $targets = append $targets $target }}
{{- end }}
{{- toJson $targets }}
{{- end }}

{{/* JSON: the entry for a complete set of engines.existing. */}}
{{- define "warmroute.target" -}}
{{- $target := dict "selector" (include "warmroute.selectorTerms" .selector) "namespace" .namespace "port" (toString .port) }}
{{- if .onlyModel }}
{{- $_ := set $target "model" .model }}
{{- end }}
{{- if .apiKeySecret }}
{{- $_ := set $target "api_key_file" (printf "/etc/warmroute/engine-api-keys/%s/%s" .name .apiKeySecretKey) }}
{{- end }}
{{- range $key, $value := dict "kv_events_port" .kvEventsPort "kv_events_replay_port" .kvEventsReplayPort "ranks" .ranks }}
{{- if $value }}
{{- $_ := set $target $key (int $value) }}
{{- end }}
{{- end }}
{{- if .tls }}
{{- $_ := set $target "tls" true }}
{{- end }}
{{- toJson $target }}
{{- end }}

{{- define "warmroute.selectorTerms" -}}
{{- $labels := . }}
{{- $terms := list }}
{{- range $label := keys $labels | sortAlpha }}
{{- $terms = append $terms (printf "%s=%s" $label (index $labels $label)) }}
{{- end }}
{{- join "," $terms }}
{{- end }}

{{/* JSON of a source: kind, where (reference without scheme and suffix), suffix (revision or path), folder in the container. */}}
{{- define "warmroute.source" -}}
{{- $text := . }}
{{- $kind := "hostPath" }}
{{- $where := $text }}
{{- $suffix := "" }}
{{- $folder := "/model" }}
{{- if contains "://" $text }}
{{- $kind = first (splitList "://" $text) }}
{{- $where = rest (splitList "://" $text) | join "://" }}
{{- end }}
{{- if eq $kind "hf" }}
{{- $parts := splitn "@" 2 $where }}
{{- $where = $parts._0 }}
{{- $suffix = $parts._1 | default "main" }}
{{- $folder = printf "/models/%s--%s" ($where | replace "/" "--") ($suffix | replace "/" "--") }}
{{- else if eq $kind "pvc" }}
{{- $parts := splitn "/" 2 $where }}
{{- $where = $parts._0 }}
{{- $folder = printf "/model/%s" ($parts._1 | default "") | trimSuffix "/" }}
{{- else if eq $kind "oci" }}
{{- $parts := splitn "#" 2 $where }}
{{- $where = $parts._0 }}
{{- $folder = printf "/model/%s" ($parts._1 | default "" | trimPrefix "/") | trimSuffix "/" }}
{{- end }}
{{- dict "kind" $kind "where" $where "suffix" $suffix "folder" $folder | toJson }}
{{- end }}

{{/* The volume that holds the checkpoint: (dict "model" MODEL "source" SOURCE). */}}
{{- define "warmroute.modelVolume" -}}
name: model
{{- $source := .source }}
{{- if eq $source.kind "pvc" }}
persistentVolumeClaim: {claimName: {{ $source.where | quote }}, readOnly: true}
{{- else if eq $source.kind "hostPath" }}
hostPath: {path: {{ $source.where | quote }}, type: Directory}
{{- else if eq $source.kind "oci" }}
image: {reference: {{ $source.where | quote }}, pullPolicy: {{ .model.image.pullPolicy }}}
{{- else if eq $source.kind "random" }}
emptyDir: {}
{{- else if .model.huggingFace.cacheClaim }}
persistentVolumeClaim: {claimName: {{ .model.huggingFace.cacheClaim | quote }}}
{{- else }}
emptyDir: {sizeLimit: {{ .model.huggingFace.cacheSize }}}
{{- end }}
{{- end }}

{{/* The container that fetches or makes the checkpoint, for sources that need it: (dict "root" $ "model" MODEL "source" SOURCE). */}}
{{- define "warmroute.modelInit" -}}
{{- $source := .source }}
{{- $hub := .model.huggingFace }}
{{- if has $source.kind (list "hf" "random") }}
- name: model
  image: {{ include "warmroute.engineImage" . | quote }}
  imagePullPolicy: {{ .model.image.pullPolicy }}
  {{- /* As process 1, neither program would end on SIGTERM, and a pod that is told to stop would keep its GPU for the grace period.
  So dumb-init is process 1. The images of vLLM and SGLang do not have it, but in their pods no container's process is number 1. */}}
  {{- if eq $source.kind "hf" }}
  command: [{{ if not (include "warmroute.isForeign" .model) }}dumb-init, --single-child, --, {{ end }}hf, download]
  args:
    - {{ $source.where | quote }}
    - {{ printf "--revision=%s" $source.suffix | quote }}
    - {{ printf "--local-dir=%s" $source.folder | quote }}
    - --include=*.safetensors
    - --include=*.json
    - --include=*.jinja
    {{- if include "warmroute.isForeign" .model }}
    # Tokenizers of other kinds, and code of models (flags.trust_remote_code).
    - --include=*.model
    - --include=*.tiktoken
    - --include=*.txt
    - --include=*.py
    {{- end }}
    # Mistral's repositories have the weights twice.
    - --exclude=consolidated*
  {{- else }}
  command: [dumb-init, --single-child, --, python, -m, engine.model.checkpoint]
  args:
    - {{ printf "--out=%s" $source.folder | quote }}
    {{- with include "warmroute.flags" .model.checkpoint | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if eq $source.kind "hf" }}
  {{- /* HF_HOME is on the checkpoints' volume, because a download keeps files beside them that are as large. */}}
  {{- $env := list }}
  {{- if include "warmroute.isForeign" .model }}
  {{- $env = append $env (dict "name" "HOME" "value" "/tmp") }}
  {{- end }}
  {{- $env = append $env (dict "name" "HF_HOME" "value" "/models/.hub") }}
  {{- with $hub.endpoint }}
  {{- $env = append $env (dict "name" "HF_ENDPOINT" "value" .) }}
  {{- end }}
  {{- if $hub.tokenSecret }}
  {{- $ref := dict "name" $hub.tokenSecret "key" $hub.tokenSecretKey }}
  {{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" $ref)) }}
  {{- end }}
  env:
    {{- include "warmroute.env" (dict "chart" $env "extra" .model.extraEnv) | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "warmroute.securityContext" .model | nindent 4 }}
  resources:
    {{- toYaml .model.resources | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: {{ ternary "/models" "/model" (eq $source.kind "hf") }}}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{/* CPU, memory, and the GPU. */}}
{{- define "warmroute.engineResources" -}}
{{- $resources := deepCopy .resources }}
{{- if eq .device "cuda" }}
{{- $gpu := dict .gpu.resourceName (include "warmroute.gpuCount" . | int) }}
{{- $resources = mergeOverwrite $resources (dict "limits" $gpu "requests" (deepCopy $gpu)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

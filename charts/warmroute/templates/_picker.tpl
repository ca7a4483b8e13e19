{{/*
The gateways as the endpoint picker of a gateway of the Gateway API Inference Extension.
*/}}

{{- define "warmroute.picks" -}}
{{- if .Values.endpointPicker.enabled }}true{{ end }}
{{- end }}

{{/* The Service that leads to the picker. */}}
{{- define "warmroute.pickerName" -}}
{{- include "warmroute.componentName" (dict "root" . "component" "picker") }}
{{- end }}

{{- define "warmroute.poolName" -}}
{{- .Values.endpointPicker.pool.name | default (include "warmroute.componentName" (dict "root" . "component" "pool")) }}
{{- end }}

{{/* Secret with the picker's certificate; empty: it has none of its own. */}}
{{- define "warmroute.pickerSecret" -}}
{{- $tls := .Values.endpointPicker.tls }}
{{- if $tls.existingSecret }}
{{- $tls.existingSecret }}
{{- else if $tls.selfSigned }}
{{- include "warmroute.componentName" (dict "root" . "component" "picker-tls") }}
{{- end }}
{{- end }}

{{/* JSON list: the one set of existing engines that the pool selects, with all fields. Empty: the pool selects the chart's models, or
the pods of endpointPicker.pool.selector. */}}
{{- define "warmroute.poolSet" -}}
{{- $existing := include "warmroute.existing" . | fromJsonArray }}
{{- $isOne := and (eq (len $existing) 1) (not (include "warmroute.models" . | fromJson)) }}
{{- ternary $existing list $isOne | toJson }}
{{- end }}

{{/* JSON: the labels of the pool's pods. */}}
{{- define "warmroute.poolLabels" -}}
{{- $labels := include "warmroute.selectorLabels" (dict "root" . "component" "engine") | fromYaml }}
{{- range include "warmroute.poolSet" . | fromJsonArray }}
{{- $labels = .selector }}
{{- end }}
{{- .Values.endpointPicker.pool.selector | default $labels | toJson }}
{{- end }}

{{/* JSON list: the pool's ports. */}}
{{- define "warmroute.poolPorts" -}}
{{- $ports := list 8000 }}
{{- range include "warmroute.poolSet" . | fromJsonArray }}
{{- $ports = list (int .port) }}
{{- end }}
{{- .Values.endpointPicker.pool.targetPorts | default $ports | toJson }}
{{- end }}

{{/* JSON: the entry of --kube-targets for the pool. Its pods' port and labels are the pool's. */}}
{{- define "warmroute.poolTarget" -}}
{{- $target := dict }}
{{- range include "warmroute.poolSet" . | fromJsonArray }}
{{- $target = omit (include "warmroute.target" . | fromJson) "selector" "port" }}
{{- end }}
{{- $keys := include "warmroute.engineKeys" . | fromJsonArray }}
{{- if and $keys (include "warmroute.existing" . | fromJsonArray) }}
{{- $_ := set $target "api_key_file" (printf "%s/%s" (first $keys).folder (first $keys).key) }}
{{- end }}
{{- $_ := set $target "pool" (include "warmroute.poolName" .) }}
{{- $_ := set $target "namespace" (include "warmroute.namespace" .) }}
{{- toJson $target }}
{{- end }}

{{- define "warmroute.validatePicker" -}}
{{- $picker := .Values.endpointPicker }}
{{- $existing := include "warmroute.existing" . | fromJsonArray }}
{{- if and $picker.httpRoute.enabled (not $picker.httpRoute.parentRefs) }}
{{- fail "endpointPicker.httpRoute.enabled needs endpointPicker.httpRoute.parentRefs: name the Gateway, e.g. [{name: inference}], or make routes of your own and set endpointPicker.httpRoute.enabled=false" }}
{{- end }}
{{- if and $picker.tls.existingSecret $picker.tls.selfSigned }}
{{- fail "endpointPicker.tls.existingSecret and endpointPicker.tls.selfSigned are both set: remove one of them" }}
{{- end }}
{{- if and (not $picker.pool.create) (not $picker.pool.name) }}
{{- fail "endpointPicker.pool.create is false and endpointPicker.pool.name is empty: name the InferencePool to follow" }}
{{- end }}
{{- if and $picker.objectives.priorities (not $picker.objectives.enabled) }}
{{- fail "endpointPicker.objectives.priorities needs endpointPicker.objectives.enabled: without it, gateways do not read them" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.proxiesFrom) }}
{{- fail "endpointPicker.enabled needs networkPolicy.proxiesFrom: the proxies must reach the picker and the engines; say where the proxies run, e.g. [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: istio-system}}}], or set networkPolicy.enabled=false" }}
{{- end }}
{{- range $existing }}
{{- if ne .namespace (include "warmroute.namespace" $) }}
{{- fail (printf "engines.existing: %s is in the namespace %s, and an InferencePool selects only pods of its own namespace, %s: install the release there, or leave endpointPicker off" .name .namespace (include "warmroute.namespace" $)) }}
{{- end }}
{{- end }}
{{- if and $picker.pool.create $existing (not (include "warmroute.poolSet" . | fromJsonArray)) (not $picker.pool.selector) }}
{{- fail "endpointPicker: an InferencePool has one selector, and there are several sets of engines in models and engines.existing: give endpointPicker.pool.selector labels that all pods have, or install a release for each set" }}
{{- end }}
{{- if gt (len (include "warmroute.engineKeys" . | fromJsonArray)) 1 }}
{{- fail "endpointPicker: the engines of an InferencePool have one key: keep only one of engines.apiKey and the apiKeySecret of engines.existing" }}
{{- end }}
{{- if and $picker.pool.create (not $picker.pool.targetPorts) }}
{{- range include "warmroute.poolSet" . | fromJsonArray }}
{{- if not (regexMatch "^[0-9]+$" (toString .port)) }}
{{- fail (printf "endpointPicker: an InferencePool has numbers for ports, and the port of engines.existing %s is %q: give its number there, or set endpointPicker.pool.targetPorts" .name .port) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
PromQL matchers of this release's series: job is the Service's name for a ServiceMonitor, NAMESPACE/NAME for a PodMonitor.
*/}}
{{- define "warmroute.gatewaySeries" -}}
{{- printf "namespace=%q,job=%q" (include "warmroute.namespace" .) (include "warmroute.componentName" (dict "root" . "component" "gateway-metrics")) }}
{{- end }}

{{/* JSON list: a PodMonitor for each kind of engine that differs in labels, namespace or port: name (as a component), namespace,
labels, port, isBundled (the chart's own bundled engines). If there is only one, it is called `engine`. */}}
{{- define "warmroute.engineMonitors" -}}
{{- $existing := include "warmroute.existing" . | fromJsonArray }}
{{- $own := include "warmroute.selectorLabels" (dict "root" . "component" "engine") | fromYaml }}
{{- $namespace := include "warmroute.namespace" . }}
{{- $hasBundled := false }}
{{- range include "warmroute.models" . | fromJson }}
{{- $hasBundled = or $hasBundled (not (include "warmroute.isForeign" .)) }}
{{- end }}
{{- $kinds := include "warmroute.foreignKinds" . | fromJsonArray }}
{{- $monitors := list }}
{{- if or $hasBundled (not (concat $existing $kinds)) }}
{{- $monitors = append $monitors (dict "name" "engine" "namespace" $namespace "labels" $own "port" "metrics" "isBundled" true) }}
{{- end }}
{{- range $kinds }}
{{- $labels := merge (dict "warmroute.io/engine" .) $own }}
{{- $monitors = append $monitors (dict "name" (printf "engine-%s" .) "namespace" $namespace "labels" $labels "port" "http" "isBundled" false) }}
{{- end }}
{{- range $existing }}
{{- $monitors = append $monitors (dict "name" (printf "engine-%s" .name) "namespace" .namespace "labels" .selector "port" (.metricsPort | default .port) "isBundled" false) }}
{{- end }}
{{- if eq (len $monitors) 1 }}
{{- $_ := set (first $monitors) "name" "engine" }}
{{- end }}
{{- toJson $monitors }}
{{- end }}

{{/* Whether the release has bundled engines, or no engines at all yet. */}}
{{- define "warmroute.hasBundled" -}}
{{- range include "warmroute.engineMonitors" . | fromJsonArray }}
{{- if .isBundled }}true{{ end }}
{{- end }}
{{- end }}

{{/* Matchers of the series of several monitors: (dict "root" $ "monitors" MONITORS). */}}
{{- define "warmroute.monitoredSeries" -}}
{{- $namespaces := list }}
{{- $jobs := list }}
{{- range .monitors }}
{{- $namespaces = append $namespaces .namespace }}
{{- $jobs = append $jobs (printf "%s/%s" (include "warmroute.namespace" $.root) (include "warmroute.componentName" (dict "root" $.root "component" .name))) }}
{{- end }}
{{- $matchers := list }}
{{- range $label, $values := dict "namespace" (uniq $namespaces) "job" $jobs }}
{{- if eq (len $values) 1 }}
{{- $matchers = prepend $matchers (printf "%s=%q" $label (first $values)) }}
{{- else }}
{{- $quoted := list }}
{{- range $values }}
{{- $quoted = append $quoted (regexQuoteMeta .) }}
{{- end }}
{{- $matchers = prepend $matchers (printf "%s=~%q" $label (join "|" $quoted)) }}
{{- end }}
{{- end }}
{{- join "," $matchers }}
{{- end }}

{{- define "warmroute.engineSeries" -}}
{{- include "warmroute.monitoredSeries" (dict "root" . "monitors" (include "warmroute.engineMonitors" . | fromJsonArray)) }}
{{- end }}

{{/* The matchers of all engines except the chart's own bundled ones; empty if there are none. */}}
{{- define "warmroute.foreignSeries" -}}
{{- $monitors := list }}
{{- range include "warmroute.engineMonitors" . | fromJsonArray }}
{{- if not .isBundled }}
{{- $monitors = append $monitors . }}
{{- end }}
{{- end }}
{{- if $monitors }}
{{- include "warmroute.monitoredSeries" (dict "root" . "monitors" $monitors) }}
{{- end }}
{{- end }}

{{/* Metadata with labels by which an operator finds the object: (dict "this" (dict "root" $ "component" C) "labels" LABELS). */}}
{{- define "warmroute.monitorMetadata" -}}
{{- $metadata := include "warmroute.metadata" .this | fromYaml }}
{{- $_ := set $metadata "labels" (mergeOverwrite (deepCopy .labels) $metadata.labels) }}
{{- toYaml $metadata }}
{{- end }}

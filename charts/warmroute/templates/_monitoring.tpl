{{/*
PromQL matchers of this release's series: job is the Service's name for a ServiceMonitor, NAMESPACE/NAME for a PodMonitor.
*/}}
{{- define "warmroute.gatewaySeries" -}}
{{- printf "namespace=%q,job=%q" (include "warmroute.namespace" .) (include "warmroute.componentName" (dict "root" . "component" "gateway-metrics")) }}
{{- end }}

{{- define "warmroute.engineSeries" -}}
{{- $monitor := include "warmroute.componentName" (dict "root" . "component" "engine") }}
{{- printf "namespace=%q,job=%q" (include "warmroute.engineNamespace" .) (printf "%s/%s" (include "warmroute.namespace" .) $monitor) }}
{{- end }}

{{/* Metadata with labels by which an operator finds the object: (dict "this" (dict "root" $ "component" C) "labels" LABELS). */}}
{{- define "warmroute.monitorMetadata" -}}
{{- $metadata := include "warmroute.metadata" .this | fromYaml }}
{{- $_ := set $metadata "labels" (mergeOverwrite (deepCopy .labels) $metadata.labels) }}
{{- toYaml $metadata }}
{{- end }}

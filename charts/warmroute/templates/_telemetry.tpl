{{/*
OpenTelemetry: the standard variables, for gateways and for our own engines.
*/}}

{{/* Variables as a YAML list; none if nothing is sent. The pod's name comes first, because the attributes refer to it. */}}
{{- define "warmroute.otelEnv" -}}
{{- $otel := .Values.openTelemetry }}
{{- $env := list }}
{{- if $otel.endpoint }}
{{- $attributes := list "service.instance.id=$(K8S_POD_NAME)" "k8s.pod.name=$(K8S_POD_NAME)" }}
{{- $attributes = append $attributes (printf "k8s.namespace.name=%s" (include "warmroute.namespace" .)) }}
{{- range $name, $value := $otel.resourceAttributes }}
{{- $attributes = append $attributes (printf "%s=%s" $name $value) }}
{{- end }}
{{- $env = append $env (dict "name" "K8S_POD_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) }}
{{- $env = append $env (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" $otel.endpoint) }}
{{- $env = append $env (dict "name" "OTEL_EXPORTER_OTLP_PROTOCOL" "value" $otel.protocol) }}
{{- $env = append $env (dict "name" "OTEL_TRACES_SAMPLER" "value" "parentbased_traceidratio") }}
{{- $env = append $env (dict "name" "OTEL_TRACES_SAMPLER_ARG" "value" (toString $otel.samplingRatio)) }}
{{- if $otel.metrics }}
{{- $env = append $env (dict "name" "OTEL_METRICS_EXPORTER" "value" "otlp") }}
{{- end }}
{{- $env = append $env (dict "name" "OTEL_RESOURCE_ATTRIBUTES" "value" (join "," $attributes)) }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{/* An egress rule to the port in the collector's URL, at any address, because the collector may be anywhere. */}}
{{- define "warmroute.egressOtel" -}}
{{- with .Values.openTelemetry.endpoint }}
{{- $port := regexFind ":[0-9]+(/|$)" . | trimPrefix ":" | trimSuffix "/" | default (ternary "443" "80" (hasPrefix "https:" .)) }}
# The collector of traces.
- ports: [{port: {{ $port }}, protocol: TCP}]
{{- end }}
{{- end }}

{{/*
Names, labels and images. Helpers that take a component expect (dict "root" $ "component" "gateway").
*/}}

{{- define "warmroute.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "warmroute.fullname" -}}
{{- $name := include "warmroute.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* FULLNAME-COMPONENT, at most 63 characters, or `longest`. FULLNAME is cut if it is too long, so two components never get the same name. */}}
{{- define "warmroute.componentName" -}}
{{- $room := sub (.longest | default 63) (add 1 (len .component)) | int }}
{{- printf "%s-%s" (include "warmroute.fullname" .root | trunc $room | trimSuffix "-") .component }}
{{- end }}

{{- define "warmroute.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{/* JSON list: the namespaces in which gateways look for engines. First that of the chart's own engines, even if there are none,
then those of the existing ones. */}}
{{- define "warmroute.engineNamespaces" -}}
{{- $existing := include "warmroute.existing" . | fromJsonArray }}
{{- $namespaces := list }}
{{- if or (include "warmroute.models" . | fromJson) (not $existing) }}
{{- $namespaces = append $namespaces (include "warmroute.namespace" .) }}
{{- end }}
{{- range $existing }}
{{- $namespaces = append $namespaces .namespace }}
{{- end }}
{{- uniq $namespaces | toJson }}
{{- end }}

{{/* The labels by which a Deployment selects its pods. They can never change, so they have no version. Optional "model": the name of
one in `models`. */}}
{{- define "warmroute.selectorLabels" -}}
app.kubernetes.io/name: {{ include "warmroute.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
warmroute.io/model: {{ . | quote }}
{{- end }}
{{- end }}

{{/* commonLabels cannot replace the labels that select pods. */}}
{{- define "warmroute.labels" -}}
{{- $chart := dict
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "app.kubernetes.io/part-of" "warmroute" }}
{{- $selector := include "warmroute.selectorLabels" . | fromYaml }}
{{- toYaml (mergeOverwrite $chart (deepCopy .root.Values.commonLabels) $selector) }}
{{- end }}

{{/* Labels of a pod: (dict "root" $ "component" C "extra" podLabels). Without the chart's version: an upgrade that changes
nothing else must not restart pods. */}}
{{- define "warmroute.podLabels" -}}
{{- $selector := include "warmroute.selectorLabels" . | fromYaml }}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.commonLabels) (deepCopy .extra) $selector) }}
{{- end }}

{{- define "warmroute.metadata" -}}
name: {{ include "warmroute.componentName" (dict "root" .root "component" (.name | default .component) "longest" .longest) }}
namespace: {{ include "warmroute.namespace" .root }}
labels:
  {{- include "warmroute.labels" . | nindent 2 }}
{{- end }}

{{/* (dict "root" $ "image" IMAGE [ "repository" R ]) */}}
{{- define "warmroute.image" -}}
{{- $repository := .image.repository | default .repository }}
{{- with .root.Values.global.imageRegistry }}
{{- $parts := splitList "/" $repository }}
{{- $first := first $parts }}
{{- if and (gt (len $parts) 1) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) }}
{{- $repository = join "/" (rest $parts) }}
{{- end }}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}
{{- end }}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "warmroute.gatewayServiceAccount" -}}
{{- .Values.gateway.serviceAccount.name | default (include "warmroute.componentName" (dict "root" . "component" "gateway")) }}
{{- end }}

{{- define "warmroute.engineServiceAccount" -}}
{{- .Values.engines.serviceAccount.name | default (include "warmroute.componentName" (dict "root" . "component" "engine")) }}
{{- end }}

{{/* Base URL of the gateway within the cluster. */}}
{{- define "warmroute.gatewayUrl" -}}
http{{ if .Values.gateway.tls.existingSecret }}s{{ end }}://{{ include "warmroute.componentName" (dict "root" . "component" "gateway") }}.{{ include "warmroute.namespace" . }}:{{ .Values.gateway.service.port }}
{{- end }}

{{/* Where the load generator finds the gateways' port for operators. */}}
{{- define "warmroute.gatewayAdminUrl" -}}
http://{{ include "warmroute.componentName" (dict "root" . "component" "gateway-admin") }}.{{ include "warmroute.namespace" . }}.svc:8081
{{- end }}

{{/* The exact paths that Ingress and HTTPRoute let pass to the gateway, as JSON. */}}
{{- define "warmroute.paths" -}}
{{- list "/classify" "/detokenize" "/pooling" "/rerank" "/score" "/tokenize" "/v1/audio/speech" "/v1/audio/transcriptions" "/v1/audio/translations" "/v1/chat/completions" "/v1/completions" "/v1/embeddings" "/v1/messages" "/v1/messages/count_tokens" "/v1/models" "/v1/rerank" "/v1/score" "/v2/rerank" | toJson }}
{{- end }}

{{/* The prefixes of paths that Ingress and HTTPRoute let pass to the gateway, as JSON. */}}
{{- define "warmroute.pathPrefixes" -}}
{{- ternary (list "/v1") (list "/v1/caches" "/v1/responses") (eq true .Values.gateway.settings.pass_through) | toJson }}
{{- end }}

{{/*
The pods of the load generator's Job.
*/}}

{{- define "warmroute.loadgenTemplate" -}}
{{- $loadgen := .Values.loadgen }}
{{- $engines := int $loadgen.waitForEngines }}
{{- if not $engines }}
{{- range $name, $model := include "warmroute.models" . | fromJson }}
{{- $engines = add $engines (ternary $model.autoscaling.minReplicas $model.replicas $model.autoscaling.enabled) | int }}
{{- end }}
{{- end }}
{{- $image := include "warmroute.image" (dict "root" $ "image" $loadgen.image) }}
{{- $this := dict "root" $ "component" "loadgen" "values" $loadgen "extra" $loadgen.podLabels }}
metadata:
  labels:
    {{- include "warmroute.podLabels" $this | nindent 4 }}
  {{- with $loadgen.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 10
  {{- include "warmroute.scheduling" $this | trim | nindent 2 }}
  initContainers:
    - name: wait
      image: {{ $image | quote }}
      imagePullPolicy: {{ $loadgen.image.pullPolicy }}
      command: [python, -c]
      args:
        - |
          {{- .Files.Get "files/wait_engines.py" | nindent 10 }}
        - {{ include "warmroute.gatewayUrl" . | quote }}
        - {{ max $engines 1 | quote }}
        - {{ $loadgen.waitSeconds | quote }}
        - {{ include "warmroute.gatewayAdminUrl" . | quote }}
      {{- with include "warmroute.gatewayCaEnv" . }}
      env:
        {{- . | nindent 8 }}
      volumeMounts:
        {{- include "warmroute.gatewayCaMount" $ | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $loadgen.resources | nindent 8 }}
      securityContext:
        {{- include "warmroute.securityContext" $loadgen | nindent 8 }}
    - name: compare
      image: {{ $image | quote }}
      imagePullPolicy: {{ $loadgen.image.pullPolicy }}
      # A run that cannot be relied on (status 3) also has a result, which says so. The Job then succeeds.
      # The gateway accepts any of its keys. This takes the first.
      command:
        - sh
        - -c
        - |
          if [ -n "$API_KEYS" ]; then
            WARMROUTE_API_KEY=$(printf '%s\n' "$API_KEYS" | sed -e 's/^[[:space:]]*//' -e '/^#/d' -e '/^$/d' | head -n 1)
            export WARMROUTE_API_KEY
          fi
          warmroute-loadgen compare "$@"
          status=$?
          [ "$status" -ne 3 ] || status=0
          echo "$status" > /results/status
        - compare
      args:
        - {{ printf "--url=%s" (include "warmroute.gatewayUrl" .) | quote }}
        - {{ printf "--admin-url=%s" (include "warmroute.gatewayAdminUrl" .) | quote }}
        - --out=/results
        {{- if not $loadgen.settings.model }}
        {{- with include "warmroute.existingModel" . }}
        - {{ printf "--model=%s" . | quote }}
        {{- end }}
        {{- end }}
        {{- with include "warmroute.flags" $loadgen.settings | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $loadgen.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- $env := include "warmroute.gatewayCaEnv" . | fromYamlArray }}
      {{- if include "warmroute.hasApiKeys" . }}
      {{- $key := dict "name" (include "warmroute.apiKeysSecret" .) "key" .Values.gateway.apiKeys.secretKey }}
      {{- $env = append $env (dict "name" "API_KEYS" "valueFrom" (dict "secretKeyRef" $key)) }}
      {{- end }}
      {{- if or $env $loadgen.extraEnv }}
      env:
        {{- include "warmroute.env" (dict "chart" $env "extra" $loadgen.extraEnv) | nindent 8 }}
      {{- end }}
      {{- with $loadgen.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $loadgen.resources | nindent 8 }}
      securityContext:
        {{- include "warmroute.securityContext" $loadgen | nindent 8 }}
      volumeMounts:
        - {name: results, mountPath: /results}
        - {name: tmp, mountPath: /tmp}
        {{- with include "warmroute.gatewayCaMount" . }}
        {{- . | nindent 8 }}
        {{- end }}
  containers:
    # This container's log is the Job's log, so it prints only the result.
    - name: result
      image: {{ $image | quote }}
      imagePullPolicy: {{ $loadgen.image.pullPolicy }}
      # It sleeps because containerd 1.6 may cut the log of a container that ends as soon as it has written a lot.
      command: [sh, -c, 'test ! -f /results/result.json || cat /results/result.json; sleep 3; exit $(cat /results/status)']
      resources:
        {{- toYaml $loadgen.resources | nindent 8 }}
      securityContext:
        {{- include "warmroute.securityContext" $loadgen | nindent 8 }}
      volumeMounts:
        - {name: results, mountPath: /results, readOnly: true}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- with include "warmroute.gatewayCaVolume" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if $loadgen.resultsClaim }}
    - {name: results, persistentVolumeClaim: {claimName: {{ $loadgen.resultsClaim | quote }}}}
    {{- else }}
    - {name: results, emptyDir: {}}
    {{- end }}
{{- end }}

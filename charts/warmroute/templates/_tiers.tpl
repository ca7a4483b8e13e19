{{/*
The tiers of KV below the pool: flags, mounts and volumes. _validate.tpl refuses values that contradict each other.
*/}}

{{- define "warmroute.tierArgs" -}}
{{- if .hostBytes }}
- --host-cache-bytes={{ int64 .hostBytes }}
{{- end }}
{{- if .disk.bytes }}
- --disk-cache-bytes={{ int64 .disk.bytes }}
- --disk-cache-path=/var/cache/warmroute/disk
{{- end }}
{{- if .shared.bytes }}
- --shared-cache-bytes={{ int64 .shared.bytes }}
- --shared-cache-path=/var/cache/warmroute/shared
{{- end }}
{{- end }}

{{- define "warmroute.tierMounts" -}}
{{- if .disk.bytes }}
- {name: kv-disk, mountPath: /var/cache/warmroute/disk}
{{- end }}
{{- if .shared.bytes }}
- {name: kv-shared, mountPath: /var/cache/warmroute/shared{{ with .shared.subPath }}, subPath: {{ . | quote }}{{ end }}}
{{- end }}
{{- end }}

{{/* The volume also has room for the file system's own data and for the trial at the start. */}}
{{- define "warmroute.tierDiskSize" -}}
{{ div (add (mul (int64 .) 21) 1342177280) 20971520 }}Mi
{{- end }}

{{- define "warmroute.tierVolumes" -}}
{{- $tiers := .values.tiers }}
{{- with $tiers.disk }}
{{- if .bytes }}
{{- if eq .volume "ephemeral" }}
- name: kv-disk
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels:
          {{- include "warmroute.selectorLabels" $ | nindent 10 }}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .storageClassName }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources: {requests: {storage: {{ include "warmroute.tierDiskSize" .bytes }}}}
{{- else }}
- {name: kv-disk, emptyDir: {sizeLimit: {{ include "warmroute.tierDiskSize" .bytes }}}}
{{- end }}
{{- end }}
{{- end }}
{{- if $tiers.shared.bytes }}
- {name: kv-shared, persistentVolumeClaim: {claimName: {{ $tiers.shared.claim | quote }}}}
{{- end }}
{{- end }}

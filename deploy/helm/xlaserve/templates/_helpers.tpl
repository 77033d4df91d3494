{{- define "xlaserve.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "xlaserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "xlaserve.labels" -}}
{{ include "xlaserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What the server reads. */}}
{{- define "xlaserve.config" -}}
{{- toYaml .Values.config -}}
{{- end -}}

{{/* Matchers of the metrics of this release's pods: NAME-(hash of the pods' template)-(suffix). */}}
{{- define "xlaserve.pods" -}}
namespace="{{ .Release.Namespace }}", pod=~"{{ include "xlaserve.fullname" . }}-[a-z0-9]+-[a-z0-9]+"
{{- end -}}

{{/* Whether the server is ready; takes whether it has TLS, with which Kubernetes probes no gRPC. */}}
{{- define "xlaserve.readiness" -}}
{{- if . -}}
httpGet: {scheme: HTTPS, port: http, path: /v2/health/ready}
{{- else -}}
grpc: {port: 8001}
{{- end -}}
{{- end -}}

{{/* 25 s more than the configuration says that the end of a server takes: preStop takes 5 of them. */}}
{{- define "xlaserve.grace" -}}
{{- $given := .Values.config -}}
{{- addf 25 (default 0 $given.shutdown_delay_s) (default 30 $given.drain_timeout_s) | ceil -}}
{{- end -}}

{{/* How fast an autoscaler acts. */}}
{{- define "xlaserve.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}

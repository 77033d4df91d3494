"""What the server says of itself: metrics, logs, and the HTTP endpoint that shows them.

`http` answers Prometheus and supervisors, no inference. Gauges of the models are in `model.gauges`.
"""

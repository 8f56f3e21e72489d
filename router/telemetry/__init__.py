"""What operators see of the requests: metrics, access log, explanations."""

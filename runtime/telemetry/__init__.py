"""OpenTelemetry: what a request's timeline tells, sent as spans once the request has ended."""

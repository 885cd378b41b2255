"""`paged-backend doctor`: looks at a deployment, or at a running server, and says what to change."""

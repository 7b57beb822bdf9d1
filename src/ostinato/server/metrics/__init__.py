"""What is measured while serving, for Prometheus and for the page."""

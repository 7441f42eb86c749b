"""One file an isolation. All keep the contract in sandboxes.protocol."""

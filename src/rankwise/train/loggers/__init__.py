"""What writes down a training: files, terminals, dashboards."""

"""What the doctor has found, as text, as JSON, and as a page with the hosts as a heat map."""

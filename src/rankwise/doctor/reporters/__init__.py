"""What the doctor has found, as text and as JSON."""

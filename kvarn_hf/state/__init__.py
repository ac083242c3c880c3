"""What a layer holds, as values: no device is asked, nothing is computed."""

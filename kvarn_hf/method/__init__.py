"""The method in plain torch: it defines what is right, and it is the path taken on CPUs."""

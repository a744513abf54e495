"""Jobs of several processes: how they join, wait for each other, and notice that one of them is lost."""

"""An agent that burns a core while it is awake. Standard library only."""

count = 0
while True:
    count += 1

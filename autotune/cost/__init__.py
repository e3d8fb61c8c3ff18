"""What a plan costs: work, bytes, memory and links. Imports no torch."""

"""Parts of the fault campaign (`benchmarks/fault_campaign.py`)."""

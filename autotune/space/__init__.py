"""The search space: model, cluster, training, plans and the rules that refuse them. Imports no torch."""

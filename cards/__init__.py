"""Cards: what a model is, as data.

A card names the components, the loops that run them, the recipe that made the weights and the parity that the card
promises. Nothing here runs a step: ``loops`` say what to evaluate next and ``inference`` evaluates it.
"""

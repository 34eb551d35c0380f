"""How an attempt begins: identity compared, checkpoint chosen and restored, the decision announced."""

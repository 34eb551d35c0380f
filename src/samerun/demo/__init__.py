"""The main job on real text: a small GPT trained on two ranks, interrupted several ways, compared with its twin."""

"""The measurements behind the numbers of the documentation, one script each; results in results/."""

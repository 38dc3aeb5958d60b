"""What is added to the core, a folder each; `base.extensions` finds them. Each can be deleted."""

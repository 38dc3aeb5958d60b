"""The stages that training engines hold."""

"""AMD GPUs through AMD SMI."""

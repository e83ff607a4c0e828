"""The processes of the service: a supervisor that holds the listening socket, and the workers that answer."""

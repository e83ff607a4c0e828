"""What one process counts, and how the processes of a service add it up through files in a shared folder."""

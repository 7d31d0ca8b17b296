"""What packing gains over padding, by how much lengths differ."""

"""Machine images as data and as a program: flavours, pinned versions, what goes together, and how Packer is driven."""

"""What can be wrong with an image that is asked for, in one sentence.

ImageError            an image cannot be made as asked; trying again does not help
└── BuildFailed       Packer or Ansible ran and failed
"""


class ImageError(Exception):
    """The image cannot be made as asked; the text says what is wrong, where, and what to do."""


class BuildFailed(ImageError):
    """The build ran and failed."""

    def __init__(self, sentence: str, *, passing: bool = False) -> None:
        super().__init__(sentence)
        self.passing = passing
        """Whether the reason is one that passes by itself."""

"""What is wrong with a template."""


class TemplateError(Exception):
    """The template is wrong, or uses what is not emulated; the text is CloudFormation's ValidationError."""

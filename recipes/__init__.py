"""What to run: the `Recipe` model, the gallery of YAML files, and errors a person can act on."""

from recipes.spec import Recipe as Recipe

"""Make sure that a machine image exists: found by its content hash, or baked by Packer and Ansible, never twice.

python -m flows.build_image recipes/llama3-8b-p5.yaml --aws
python -m flows.build_image --flavour local
python -m flows.build_image --flavour local --prune keep=3
python -m flows.build_image --container local
"""

if __name__ == "__main__":  # an image that exists is found without Prefect
    from flows._image import command

    command(__doc__)
else:
    from flows._house import alone, verb
    from recipes import Recipe
    from store import open_store
    from tasks import container, container_wanted, image, image_wanted
    from tasks.image import Publication

    @verb("build_image", description=__doc__)
    def build_image(
        recipe: Recipe = Recipe(),
        flavour: str = "",
        regions: tuple[str, ...] = (),
        publication: Publication = Publication(),
        container_flavour: str = "",
        rootfs: str = "",
    ) -> str:
        """Bake the image of a recipe's nodes, or say why there is nothing to bake; or that flavour, or that container.

        `rootfs` is the folder of the file system that a container starts from, where it starts from none's image.
        """
        if container_flavour:
            return container.make(container_wanted.wanted(container_flavour, regions, rootfs), open_store(recipe.store))
        if flavour:
            wanted = image_wanted.wanted(flavour, regions)
            return image.told(image.make(wanted, open_store(recipe.store), publication), wanted)
        with alone(recipe):
            return image.build(recipe)

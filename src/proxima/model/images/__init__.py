"""The images that prompts show to a model.

    image_store   `ImageStore`: numbers the images of a run; each becomes tokens and pixels
    image_folder  the folder `images/` of a run, whose files are checked by their names
    image_inputs  `ImageReader`: features of the vision tower in place of embeddings, and positions of three axes

Imports: PIL when there is an image, `proxima.data`, `model`. Imported by `model`, `engine`, `runtime`, `config` and
`view`.
"""

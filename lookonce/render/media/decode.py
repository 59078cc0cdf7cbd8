"""Encoded picture bytes → an upright RGB picture, exactly as Hugging Face would see it.

Only PNG, JPEG, WebP and GIF are opened; the pixel count is read from the header and judged before
anything is decoded. What Hugging Face does to the same bytes decides every choice here: EXIF
orientation is applied (`image_utils.load_image`), transparency is composited onto white
(`image_transforms.convert_to_rgb`), an animation is its first frame, and other modes become RGB
by Pillow's own rules.
"""

from __future__ import annotations

import warnings
from io import BytesIO

from PIL import Image, ImageOps

from lookonce.errors import TooLargeError, UnprocessableMediaError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SIDE_RATIO = 200
"""Longer side over shorter one. Processors that fix the shorter side would blow up a thin picture;
Qwen's refuses above the same ratio."""


def decode_image(data: bytes | memoryview, max_pixels: int) -> Image.Image:
    """The picture in mode RGB. Raises `UnprocessableMediaError` or `TooLargeError`."""
    image = _open(data, max_pixels)
    try:
        return _to_rgb(ImageOps.exif_transpose(image))
    except Exception:  # noqa: BLE001  decoders raise anything on hostile bytes, with unsafe texts
        raise UnprocessableMediaError(
            f"the image is broken or incomplete ({image.format})"
        ) from None


def _open(data: bytes | memoryview, max_pixels: int) -> Image.Image:
    """The header read and judged, no pixel decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of sizes that are judged right below
            image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_many_pixels(max_pixels) from None
    except Exception:  # noqa: BLE001  see decode_image
        raise UnprocessableMediaError(
            "the data is not a readable PNG, JPEG, WebP or GIF image"
        ) from None
    _judge_size(*image.size, max_pixels)
    return image


def _judge_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise UnprocessableMediaError("the image is empty")
    if width * height > max_pixels:
        raise _too_many_pixels(max_pixels)
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise UnprocessableMediaError(
            f"the image is more than {MAX_SIDE_RATIO} times longer than wide, or wider than long"
        )


def _too_many_pixels(max_pixels: int) -> TooLargeError:
    return TooLargeError(f"the image has more than {max_pixels} pixels")


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")

"""PDF -> text by PDFium, the library of Chromium, which hostile files have been thrown at for years."""

from lmlong.data.converters.limits import LARGEST, Broken, check_text


def pdf_text(data: bytes, most: int = LARGEST) -> str:
    """Return the text of a PDF, its pages one after the other, with a blank line between them; up to `most` characters
    of it."""
    import pypdfium2

    texts, size = [], 0
    try:
        document = pypdfium2.PdfDocument(data)
        for number in range(len(document)):
            page = document[number].get_textpage().get_text_bounded()
            texts.append(page.replace("\r\n", "\n").replace("\r", "\n").replace("\ufffe", "").strip("\n"))
            size += len(page)
            check_text(size, min(most, LARGEST))
    except pypdfium2.PdfiumError as error:
        raise Broken("encrypted" if "password" in str(error) else str(error).rstrip(".")) from None
    return "\n\n".join(filter(None, texts)) + "\n" if any(texts) else ""

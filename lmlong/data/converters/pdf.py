"""PDF -> text by PDFium, the library of Chromium, which hostile files have been thrown at for years."""

from lmlong.data.converters.office import Broken


def pdf_text(data: bytes) -> str:
    """Return the text of a PDF, its pages one after the other, with a blank line between them."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
        pages = [document[number].get_textpage().get_text_bounded() for number in range(len(document))]
    except pypdfium2.PdfiumError as error:
        raise Broken(str(error).rstrip(".")) from None
    texts = [page.replace("\r\n", "\n").replace("\r", "\n").replace("\ufffe", "").strip("\n") for page in pages]
    return "\n\n".join(filter(None, texts)) + "\n" if any(texts) else ""

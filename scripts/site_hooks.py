"""For mkdocs.yml: pages name one another as `docs/kbit.md`, which is a link on the site."""

import posixpath
import re


def on_page_markdown(markdown, page, config, files):
    def link(match):
        target = match[1]
        if files.get_file_from_path(target) is None:
            return match[0]
        return f"[{match[0]}]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')})"

    return re.sub(r"`docs/([\w/-]+\.md)`", link, markdown)

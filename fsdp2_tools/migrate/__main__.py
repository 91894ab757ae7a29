"""The command of `migration` under the name of the book: python -m fsdp2.migrate"""

from fsdp2.run.process import early
from migration.__main__ import main, main_of_files

if __name__ == "__main__":
    early.answer(main_of_files)

from fsdp2.run.process import ending

if __name__ == "__main__":
    with ending.exit_status():
        main()

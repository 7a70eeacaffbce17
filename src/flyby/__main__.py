from flyby.cli import main

main()

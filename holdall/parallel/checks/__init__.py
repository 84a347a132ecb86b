"""Does a model that was divided over ranks compute what it did before?"""

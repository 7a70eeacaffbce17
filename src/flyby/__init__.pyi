from flyby.api import Judged as Judged
from flyby.api import Model as Model
from flyby.api import backbone as backbone
from flyby.api import fuse as fuse
from flyby.api import load as load
from flyby.api import load_model as load_model
from flyby.api import orient as orient
from flyby.api import read_parcel as read_parcel
from flyby.api import recipe_for as recipe_for
from flyby.api import run as run
from flyby.api import train as train
from flyby.api import train_all as train_all
from flyby.api import write_parcel as write_parcel
from flyby.data.dataset import Dataset as Dataset
from flyby.data.federation import Data as Data
from flyby.data.federation import Sites as Sites
from flyby.data.site import Site as Site
from flyby.data.splits import Split as Split
from flyby.errors import BadInput as BadInput
from flyby.errors import Diverged as Diverged
from flyby.errors import FlybyError as FlybyError
from flyby.fusion.base import Fusion as Fusion
from flyby.models.spec import ModelSpec as ModelSpec
from flyby.objectives.base import Objective as Objective
from flyby.parcels.ledger import Ledger as Ledger
from flyby.parcels.parcel import Parcel as Parcel
from flyby.runs.folder import Result as Result
from flyby.runs.folder import Run as Run
from flyby.runs.pipeline import Options as Options
from flyby.training.recipe import Recipe as Recipe

__version__: str
__all__: list[str]
